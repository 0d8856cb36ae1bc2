// Matrix products: rows of activations against packed weights. A row's bits never depend on the other rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "matrix.h"

namespace redraft {

constexpr std::ptrdiff_t kWorthThreads = 16384;  // numbers; less is done sooner than other threads wake

// Activation rows in the form that a weight format wants, padded with zeros to the matrix's padded columns.
struct Rows {
  std::ptrdiff_t count = 0, columns = 0;
  std::vector<float> floats;     // f32, and bf16 without tiles: [count][columns]
  std::vector<uint16_t> halves;  // bf16 with tiles
  std::vector<int8_t> bytes;     // quantized
  std::vector<float> scales;     // [count][columns / 32]: absolute maximum of a group / 127
  std::vector<int32_t> sums;     // [count][columns / 32]: of the group's bytes
};

// y[r][16·b + n] for blocks b in [first, end) of one expert, for all rows; y has `stride` floats a row.
using GemmBlocks = void (*)(const Matrix& w, std::ptrdiff_t expert, const Rows& x, float* y, std::ptrdiff_t stride,
                            std::ptrdiff_t first, std::ptrdiff_t end);

namespace avx2 {
void gemm_blocks(const Matrix&, std::ptrdiff_t, const Rows&, float*, std::ptrdiff_t, std::ptrdiff_t, std::ptrdiff_t);
void quantize_rows(const float* x, std::ptrdiff_t columns, std::ptrdiff_t first, std::ptrdiff_t end, Rows& out);
}  // namespace avx2
namespace avx512 {
void gemm_blocks(const Matrix&, std::ptrdiff_t, const Rows&, float*, std::ptrdiff_t, std::ptrdiff_t, std::ptrdiff_t);
void quantize_rows(const float* x, std::ptrdiff_t columns, std::ptrdiff_t first, std::ptrdiff_t end, Rows& out);
}  // namespace avx512
namespace amx {
void gemm_blocks(const Matrix&, std::ptrdiff_t, const Rows&, float*, std::ptrdiff_t, std::ptrdiff_t, std::ptrdiff_t);
void round_rows(const float* x, std::ptrdiff_t columns, std::ptrdiff_t first, std::ptrdiff_t end, Rows& out);
}  // namespace amx

// Bring rows x [count, columns] into the form that `format` wants.
void prepare(Format format, const float* x, std::ptrdiff_t count, std::ptrdiff_t columns,
             std::ptrdiff_t padded_columns, Rows& out);

// x [count, K] · wᵀ → y [count, N] (+ bias [N] where given), on all threads.
void linear(const Matrix& w, const float* x, std::ptrdiff_t count, const float* bias, float* y);

GemmBlocks gemm_blocks_in_use();

}  // namespace redraft
