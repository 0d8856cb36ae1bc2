// Weight matrices as the kernels read them: repacked once, at about the size they have on disk.
//
// A matrix [N, K] is cut into blocks of 16 outputs; N is padded to 16 and K to 32 with zeros. A block of floats:
//   f32   [K][16]       4 B a weight
//   bf16  [K/2][16][2]  2 B: the order of tile registers; f16 weights are rounded to it
// A block of a quantized format has what super-blocks of 8 groups share, then the scales of all groups of 32 inputs,
// then, from a whole cache line on, their numbers q:
//   format  value                 numbers of a group              scales of a group         of a super-block
//   q8      s·q                   [8][16][4] signed               16 half s
//   q4      s·(q − 8)             nibbles                         16 half s
//   q4m     s·q + m               nibbles                         16 half s, 16 half m
//   q4k     d·s·q + e·m           nibbles                         16 byte s, 16 byte m      16 half d, 16 half e
//   q5k     d·s·q + e·m           nibbles, 8 × 64 upper bits      16 byte s, 16 byte m      16 half d, 16 half e
//   q6k     d·s·(q − 32)          nibbles, 2 × 64 pairs of bits   2 × 16 signed bytes s     16 half d
// Nibbles are [4][16][4] bytes with k < 16 in the lower halves. The scales of q6k are for k < 16 and for the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

namespace redraft {

enum class Format { f32, bf16, q8, q4, q4m, q4k, q5k, q6k };

constexpr std::ptrdiff_t kBlock = 16;  // outputs in a block
constexpr std::ptrdiff_t kGroup = 32;  // inputs in a group
constexpr std::ptrdiff_t kSuper = 8;   // groups in a super-block

// Bytes of 16 outputs: a group's numbers, its scales and minima, and what a super-block shares.
struct Layout {
  std::ptrdiff_t numbers, scales, super;
};

constexpr Layout layout(Format format) {
  switch (format) {
    case Format::q8: return {512, 32, 0};
    case Format::q4: return {256, 32, 0};
    case Format::q4m: return {256, 64, 0};
    case Format::q4k: return {256, 32, 64};
    case Format::q5k: return {256 + 64, 32, 64};
    case Format::q6k: return {256 + 128, 32, 32};
    default: return {0, 0, 0};
  }
}

constexpr bool has_minima(Format format) {
  return format == Format::q4m || format == Format::q4k || format == Format::q5k;
}

// Calls f with a quantized format as a constant: f(std::integral_constant<Format, …>).
template <class Body>
inline void with_format(Format format, Body f) {
  switch (format) {
    case Format::q8: return f(std::integral_constant<Format, Format::q8>());
    case Format::q4: return f(std::integral_constant<Format, Format::q4>());
    case Format::q4m: return f(std::integral_constant<Format, Format::q4m>());
    case Format::q4k: return f(std::integral_constant<Format, Format::q4k>());
    case Format::q5k: return f(std::integral_constant<Format, Format::q5k>());
    case Format::q6k: return f(std::integral_constant<Format, Format::q6k>());
    default: return;
  }
}

// The parts of a quantized block.
struct Groups {
  const uint8_t *supers, *scales, *numbers;
};

struct Matrix {
  Format format;
  std::ptrdiff_t experts, rows, columns;           // E, N, K
  std::ptrdiff_t padded_rows, padded_columns;
  std::ptrdiff_t block_bytes;                      // of one block of 16 outputs over all K
  std::ptrdiff_t scales_at, numbers_at;            // bytes from the start of a quantized block
  std::ptrdiff_t num_bytes;
  std::unique_ptr<uint8_t, void (*)(void*)> data;

  const uint8_t* block(std::ptrdiff_t expert, std::ptrdiff_t index) const {
    return data.get() + (expert * (padded_rows / kBlock) + index) * block_bytes;
  }
  Groups groups(const uint8_t* block) const { return {block, block + scales_at, block + numbers_at}; }
  bool quantized() const { return format >= Format::q8; }
};

// Repack E matrices [N, K] given in a file's encoding (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K), rows one
// after another.
std::unique_ptr<Matrix> pack(const void* data, const std::string& encoding, std::ptrdiff_t experts,
                             std::ptrdiff_t rows, std::ptrdiff_t columns);

// One row [K] as floats: the values that the file's encoding stands for (F16: rounded to bf16).
void unpack_row(const Matrix& matrix, std::ptrdiff_t row, float* out);

}  // namespace redraft
