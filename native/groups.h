// Groups of quantized weights as vectors, for every instruction set: numbers as unsigned bytes, scales as floats.
#pragma once

#include "matrix.h"
#include "simd.h"

namespace redraft::ISA {

// How many parts of a group have a scale of their own.
template <Format F>
constexpr int kParts = F == Format::q6k ? 2 : 1;

// What `numbers` are above the values they stand for.
template <Format F>
constexpr int kExcess = F == Format::q8 ? 128 : F == Format::q4 ? 8 : F == Format::q6k ? 32 : 0;

// Numbers k = 4·J … 4·J + 3 of a group for sixteen outputs, with their excess. Of q8 as they are: signed, without it.
template <Format F, int J>
inline Bytes numbers(const uint8_t* group) {
  if constexpr (F == Format::q8) return load_lanes(group + 64 * J);
  const Bytes nibbles = mask(shift_right<J / 4 * 4>(load_lanes(group + J % 4 * 64)), 15);
  if constexpr (F == Format::q5k) return either(nibbles, where_bits(group + 256 + 8 * J, 16));
  if constexpr (F == Format::q6k)
    return either(nibbles, mask(shift_right<J % 4 * 2 - 4>(load_lanes(group + 256 + J / 4 * 64)), 0x30));
  return nibbles;
}

template <Format F>
inline V16 scale(const Groups& groups, std::ptrdiff_t g, int part) {
  const uint8_t* scales = groups.scales + g * layout(F).scales;
  if constexpr (layout(F).super == 0) return load_half(scales);
  const V16 of_super = load_half(groups.supers + g / kSuper * layout(F).super);
  return mul(of_super, to_float(F == Format::q6k ? load_signed_bytes(scales + 16 * part) : load_unsigned_bytes(scales)));
}

template <Format F>
inline V16 minimum(const Groups& groups, std::ptrdiff_t g) {
  const uint8_t* scales = groups.scales + g * layout(F).scales;
  if constexpr (F == Format::q4m) return load_half(scales + 32);
  return mul(load_half(groups.supers + g / kSuper * layout(F).super + 32), to_float(load_unsigned_bytes(scales + 16)));
}

// Calls f with a group's eight registers of numbers: f(J, numbers).
template <Format F, class Body>
inline void for_numbers(const uint8_t* group, Body f) {
  f(0, numbers<F, 0>(group));
  f(1, numbers<F, 1>(group));
  f(2, numbers<F, 2>(group));
  f(3, numbers<F, 3>(group));
  f(4, numbers<F, 4>(group));
  f(5, numbers<F, 5>(group));
  f(6, numbers<F, 6>(group));
  f(7, numbers<F, 7>(group));
}

constexpr std::ptrdiff_t kAhead = 4096;  // bytes that weights are asked for before they are needed

// Asks for a block's bytes kAhead before they are needed, group by group.
class Ahead {
 public:
  Ahead(const uint8_t* block, std::ptrdiff_t block_bytes, std::ptrdiff_t groups)
      : next_(block + kAhead), until_(next_), step_(block_bytes / groups) {}

  void ask_for_a_group() {
    until_ += step_;
    for (; next_ < until_; next_ += 64) _mm_prefetch(reinterpret_cast<const char*>(next_), _MM_HINT_T0);
  }

 private:
  const uint8_t *next_, *until_;
  std::ptrdiff_t step_;
};

}  // namespace redraft::ISA
