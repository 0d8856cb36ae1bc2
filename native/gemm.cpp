// Products of float weights without tiles. Each output has two accumulators, for even and odd k; how many rows share
// a pass over the weights changes nothing else.
#include "gemm.h"

#include <algorithm>

#include "simd.h"

namespace redraft::ISA {
namespace {

// R rows of x against one block of outputs, of which y has `width`.
template <int R, bool kHalf>
void float_rows(const uint8_t* block, const float* x, std::ptrdiff_t columns, float* y, std::ptrdiff_t stride,
                std::ptrdiff_t width) {
  V16 even[R], odd[R];
  for (int r = 0; r < R; ++r) even[r] = odd[r] = zero();
  for (std::ptrdiff_t k = 0; k < columns; k += 2) {
    const uint8_t* p = block + k * kBlock * (kHalf ? 2 : 4);
    const V16 w0 = kHalf ? bf16_even(p) : load(reinterpret_cast<const float*>(p));
    const V16 w1 = kHalf ? bf16_odd(p) : load(reinterpret_cast<const float*>(p) + kBlock);
    for (int r = 0; r < R; ++r) {
      even[r] = fma(set1(x[r * columns + k]), w0, even[r]);
      odd[r] = fma(set1(x[r * columns + k + 1]), w1, odd[r]);
    }
  }
  for (int r = 0; r < R; ++r) store_first(y + r * stride, add(even[r], odd[r]), width);
}

template <bool kHalf>
void float_blocks(const Matrix& w, std::ptrdiff_t expert, const Rows& x, float* y, std::ptrdiff_t stride,
                  std::ptrdiff_t first, std::ptrdiff_t end) {
  for (std::ptrdiff_t b = first; b < end; ++b) {
    const uint8_t* block = w.block(expert, b);
    const std::ptrdiff_t width = std::min(kBlock, w.rows - b * kBlock), columns = w.padded_columns;
    std::ptrdiff_t row = 0;
    const auto some = [&](auto count) {
      for (; row + count() <= x.count; row += count())
        float_rows<count(), kHalf>(block, x.floats.data() + row * columns, columns, y + row * stride + b * kBlock,
                                   stride, width);
    };
    some(std::integral_constant<int, 4>());
    some(std::integral_constant<int, 1>());
  }
}

}  // namespace

void gemm_blocks(const Matrix& w, std::ptrdiff_t expert, const Rows& x, float* y, std::ptrdiff_t stride,
                 std::ptrdiff_t first, std::ptrdiff_t end) {
  if (w.quantized()) {
    quantized_blocks(w, expert, x, y, stride, first, end);
  } else if (w.format == Format::bf16) {
    float_blocks<true>(w, expert, x, y, stride, first, end);
  } else {
    float_blocks<false>(w, expert, x, y, stride, first, end);
  }
}

}  // namespace redraft::ISA
