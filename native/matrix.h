// Weight matrices as the kernels read them: repacked once, at the size they have on disk.
//
// A matrix [N, K] is cut into blocks of 16 outputs; N is padded to 16 and K to 32 with zeros. Within a block:
//   f32   [K][16]                    4 B a weight
//   bf16  [K/2][16][2]               2 B: the order of tile registers; f16 weights are rounded to it
//   q8    groups of 32 k: [8][16][4] int8, then 16 half scales
//   q4    groups of 32 k: [4][16][4] bytes (k < 16 in the low nibble), then 16 half scales; values are q − 8
//   q4m   the same with 16 half minima after the scales; values are scale·q + minimum
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace redraft {

enum class Format { f32, bf16, q8, q4, q4m };

constexpr std::ptrdiff_t kBlock = 16;  // outputs in a block
constexpr std::ptrdiff_t kGroup = 32;  // inputs in a group

struct Matrix {
  Format format;
  std::ptrdiff_t experts, rows, columns;           // E, N, K
  std::ptrdiff_t padded_rows, padded_columns;
  std::ptrdiff_t block_bytes;                      // of one block of 16 outputs over all K
  std::ptrdiff_t num_bytes;
  std::unique_ptr<uint8_t, void (*)(void*)> data;

  const uint8_t* block(std::ptrdiff_t expert, std::ptrdiff_t index) const {
    return data.get() + (expert * (padded_rows / kBlock) + index) * block_bytes;
  }
  bool quantized() const { return format >= Format::q8; }
};

std::ptrdiff_t group_bytes(Format format);

// Repack E matrices [N, K] given in a file's encoding (F32, F16, BF16, Q8_0, Q4_0, Q4_1), rows one after another.
std::unique_ptr<Matrix> pack(const void* data, const std::string& encoding, std::ptrdiff_t experts,
                             std::ptrdiff_t rows, std::ptrdiff_t columns);

// One row [K] as floats.
void unpack_row(const Matrix& matrix, std::ptrdiff_t row, float* out);

}  // namespace redraft
