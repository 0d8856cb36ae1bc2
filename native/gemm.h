// Matrix products: rows of activations against packed weights. A row's bits never depend on the other rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "matrix.h"

namespace redraft {

constexpr std::ptrdiff_t kWorthThreads = 16384;  // numbers; less is done sooner than other threads wake

constexpr std::ptrdiff_t kTile = 16;  // rows in a tile

// Activation rows in the form that a weight format wants, padded with zeros to the matrix's padded columns. Rows of
// 16-bit floats and bytes lie in tiles of 16, group after group: [tile][columns / 32][16][32]; what the last tile has
// beyond `count` may be anything.
struct Rows {
  std::ptrdiff_t count = 0, columns = 0;
  std::vector<float> floats;     // f32, and bf16 without tiles: [count][columns]
  std::vector<uint16_t> halves;  // bf16 with tiles
  std::vector<int8_t> bytes;     // quantized: in units of `scales`
  std::vector<float> scales;     // [tile][columns / 32][16]: absolute maximum of a group / 127
  std::vector<float> totals;     // the same shape: scale × sum of a group's bytes
  std::vector<int32_t> sums;     // [tile][columns / 32][2][16]: of the bytes of either half of a group

  std::ptrdiff_t groups() const { return columns / kGroup; }
  // Where (row, group) is in `scales` and `totals`; times 32 in `halves` and `bytes`.
  std::ptrdiff_t at(std::ptrdiff_t row, std::ptrdiff_t group) const {
    return (row / kTile * groups() + group) * kTile + row % kTile;
  }
  // Where the first half of (row, group) is in `sums`; the other one is kTile further.
  std::ptrdiff_t sum_at(std::ptrdiff_t row, std::ptrdiff_t group) const {
    return (row / kTile * groups() + group) * 2 * kTile + row % kTile;
  }
};

// y[r][16·b + n] for blocks b in [first, end) of one expert, for all rows; y has `stride` floats a row.
using GemmBlocks = void (*)(const Matrix& w, std::ptrdiff_t expert, const Rows& x, float* y, std::ptrdiff_t stride,
                            std::ptrdiff_t first, std::ptrdiff_t end);

namespace avx2 {
void gemm_blocks(const Matrix&, std::ptrdiff_t, const Rows&, float*, std::ptrdiff_t, std::ptrdiff_t, std::ptrdiff_t);
void quantized_blocks(const Matrix&, std::ptrdiff_t, const Rows&, float*, std::ptrdiff_t, std::ptrdiff_t, std::ptrdiff_t);
void quantize_rows(const float* x, std::ptrdiff_t columns, std::ptrdiff_t first, std::ptrdiff_t end, Rows& out);
}  // namespace avx2
namespace avx512 {
void gemm_blocks(const Matrix&, std::ptrdiff_t, const Rows&, float*, std::ptrdiff_t, std::ptrdiff_t, std::ptrdiff_t);
void quantized_blocks(const Matrix&, std::ptrdiff_t, const Rows&, float*, std::ptrdiff_t, std::ptrdiff_t, std::ptrdiff_t);
void quantize_rows(const float* x, std::ptrdiff_t columns, std::ptrdiff_t first, std::ptrdiff_t end, Rows& out);
}  // namespace avx512
namespace amx {
void gemm_blocks(const Matrix&, std::ptrdiff_t, const Rows&, float*, std::ptrdiff_t, std::ptrdiff_t, std::ptrdiff_t);
void quantized_blocks(const Matrix&, std::ptrdiff_t, const Rows&, float*, std::ptrdiff_t, std::ptrdiff_t, std::ptrdiff_t);
void round_rows(const float* x, std::ptrdiff_t columns, std::ptrdiff_t first, std::ptrdiff_t end, Rows& out);
}  // namespace amx

// Bring rows x [count, columns] into the form that `format` wants.
void prepare(Format format, const float* x, std::ptrdiff_t count, std::ptrdiff_t columns,
             std::ptrdiff_t padded_columns, Rows& out);

// x [count, K] · wᵀ → y [count, N] (+ bias [N] where given), on all threads.
void linear(const Matrix& w, const float* x, std::ptrdiff_t count, const float* bias, float* y);

GemmBlocks gemm_blocks_in_use();

}  // namespace redraft
