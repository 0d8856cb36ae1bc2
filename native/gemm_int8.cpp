// Products of quantized weights without tiles, and activations quantized to bytes for them. The sum of a group is an
// exact integer; it is scaled and added in the order of groups, however many rows share a pass over the weights.
#include <algorithm>

#include "gemm.h"
#include "groups.h"

namespace redraft::ISA {
namespace {

#ifdef __AVX512F__
constexpr bool kSignedWeights = false;
constexpr int kMostRows = 8;  // that fit into registers
template <Format F>
inline I16 dot(I16 acc, Bytes w, Bytes x) {
  if constexpr (F == Format::q8) return dot4(acc, {_mm512_xor_si512(w.v, _mm512_set1_epi8(-128))}, x);
  return dot4(acc, w, x);
}
#else
constexpr bool kSignedWeights = true;
constexpr int kMostRows = 4;
template <Format F>
inline I16 dot(I16 acc, Bytes w, Bytes x) {
  if constexpr (F == Format::q8) return signed_dot4(acc, w, x);
  return dot4(acc, w, x);
}
#endif

// What a part's sum starts from, to make good for the excess of weights.
template <Format F>
inline int32_t start(const int32_t* sums, int part) {
  if constexpr (kExcess<F> == 0 || (F == Format::q8 && kSignedWeights)) return 0;
  return -kExcess<F> * (kParts<F> == 2 ? sums[16 * part] : sums[0] + sums[16]);
}

// Rows [row, row + R) of one tile against a block of outputs, of which y has `width`.
template <Format F, int R>
void quantized_rows(const Matrix& w, const uint8_t* block, const Rows& x, std::ptrdiff_t row, float* y,
                    std::ptrdiff_t stride, std::ptrdiff_t width) {
  constexpr int kSums = kParts<F> == 2 || R == 1 ? 2 : 1;  // a row side by side, to wait less for each other
  const Groups groups = w.groups(block);
  const std::ptrdiff_t count = x.groups();
  Ahead ahead(block, w.block_bytes, count);
  V16 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = zero();
  for (std::ptrdiff_t g = 0; g < count; ++g) {
    ahead.ask_for_a_group();
    const std::ptrdiff_t at = x.at(row, g);
    const int8_t* bytes = x.bytes.data() + at * kGroup;
    const int32_t* sums = x.sums.data() + x.sum_at(row, g);
    I16 total[R][kSums];
    for (int r = 0; r < R; ++r) {
      total[r][0] = iset1(start<F>(sums + r, 0));
      if (kSums == 2) total[r][1] = iset1(kParts<F> == 2 ? start<F>(sums + r, 1) : 0);
    }
    for_numbers<F>(groups.numbers + g * layout(F).numbers, [&](int j, Bytes q) {
      for (int r = 0; r < R; ++r) {
        I16& sum = total[r][kSums == 2 ? j / 4 : 0];
        sum = dot<F>(sum, q, four_bytes(bytes + r * kGroup + 4 * j));
      }
    });
    for (int part = 0; part < kParts<F>; ++part) {
      const V16 by = scale<F>(groups, g, part);
      for (int r = 0; r < R; ++r) {
        const I16 sum = kParts<F> < kSums ? add(total[r][0], total[r][1]) : total[r][part];
        acc[r] = fma(mul(to_float(sum), by), set1(x.scales[at + r]), acc[r]);
      }
    }
    if constexpr (has_minima(F)) {
      const V16 least = minimum<F>(groups, g);
      for (int r = 0; r < R; ++r) acc[r] = fma(least, set1(x.totals[at + r]), acc[r]);
    }
  }
  for (int r = 0; r < R; ++r) store_first(y + r * stride, acc[r], width);
}

}  // namespace

void quantized_blocks(const Matrix& w, std::ptrdiff_t expert, const Rows& x, float* y, std::ptrdiff_t stride,
                      std::ptrdiff_t first, std::ptrdiff_t end) {
  with_format(w.format, [&](auto format) {
    for (std::ptrdiff_t b = first; b < end; ++b) {
      const uint8_t* block = w.block(expert, b);
      const std::ptrdiff_t width = std::min(kBlock, w.rows - b * kBlock);
      std::ptrdiff_t row = 0;
      const auto some = [&](auto count) {
        for (; row + count() <= x.count; row += count())
          quantized_rows<format(), count()>(w, block, x, row, y + row * stride + b * kBlock, stride, width);
      };
      if (kMostRows == 8) some(std::integral_constant<int, 8>());
      some(std::integral_constant<int, 4>());
      some(std::integral_constant<int, 2>());
      some(std::integral_constant<int, 1>());
    }
  });
}

void quantize_rows(const float* x, std::ptrdiff_t columns, std::ptrdiff_t first, std::ptrdiff_t end, Rows& out) {
  alignas(64) float rest[kGroup];
  for (std::ptrdiff_t r = first; r < end; ++r) {
    for (std::ptrdiff_t g = 0; g < out.groups(); ++g) {
      const float* from = x + r * columns + g * kGroup;
      const std::ptrdiff_t have = columns - g * kGroup;
      if (have < kGroup) {
        std::fill(std::copy(from, from + have, rest), rest + kGroup, 0.0f);
        from = rest;
      }
      const V16 a = load(from), b = load(from + 16);
      const float largest = max_of(max(max(a, sub(zero(), a)), max(b, sub(zero(), b))));
      const float scale = largest * (1.0f / 127.0f);
      const V16 inverse = set1(largest > 0 ? 127.0f / largest : 0.0f);
      const std::ptrdiff_t at = out.at(r, g);
      const Sums sums = store_bytes(out.bytes.data() + at * kGroup, to_int(mul(a, inverse)), to_int(mul(b, inverse)));
      out.scales[static_cast<size_t>(at)] = scale;
      out.totals[static_cast<size_t>(at)] = scale * static_cast<float>(sums.first + sums.last);
      int32_t* halves = out.sums.data() + out.sum_at(r, g);
      halves[0] = sums.first;
      halves[kTile] = sums.last;
    }
  }
}

}  // namespace redraft::ISA
