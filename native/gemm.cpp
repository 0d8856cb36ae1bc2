// Products without tiles. Each output has two float accumulators (even and odd k) or one integer sum a group, in a
// fixed order; how many rows share a pass over the weights changes nothing else.
#include "gemm.h"

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace redraft::ISA {
namespace {

template <int R, bool kHalf>
void float_rows(const Matrix& w, const uint8_t* block, const float* x, std::ptrdiff_t columns, float* y,
                std::ptrdiff_t stride, std::ptrdiff_t width) {
  V16 even[R], odd[R];
  for (int r = 0; r < R; ++r) even[r] = odd[r] = zero();
  for (std::ptrdiff_t k = 0; k < columns; k += 2) {
    const uint8_t* p = block + k * kBlock * (kHalf ? 2 : 4);
    const V16 w0 = kHalf ? bf16_even(p) : load(reinterpret_cast<const float*>(p));
    const V16 w1 = kHalf ? bf16_odd(p) : load(reinterpret_cast<const float*>(p) + kBlock);
    for (int r = 0; r < R; ++r) {
      even[r] = fma(set1(x[r * w.padded_columns + k]), w0, even[r]);
      odd[r] = fma(set1(x[r * w.padded_columns + k + 1]), w1, odd[r]);
    }
  }
  for (int r = 0; r < R; ++r) {
    alignas(64) float out[16];
    store(out, add(even[r], odd[r]));
    std::copy(out, out + width, y + r * stride);
  }
}

template <int R>
void quantized_rows(const Matrix& w, const uint8_t* block, const Rows& x, std::ptrdiff_t row, float* y,
                    std::ptrdiff_t stride, std::ptrdiff_t width) {
  const std::ptrdiff_t groups = w.padded_columns / kGroup, size = group_bytes(w.format);
  const std::ptrdiff_t weights = w.format == Format::q8 ? 512 : 256;
  V16 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = zero();
  for (std::ptrdiff_t g = 0; g < groups; ++g) {
    const uint8_t* group = block + g * size;
    for (std::ptrdiff_t line = 0; line < size; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(group + 4096 + line), _MM_HINT_T0);
    const V16 scale = load_half(group + weights);
    for (int r = 0; r < R; ++r) {
      const std::ptrdiff_t at = (row + r) * groups + g;
      const int8_t* bytes = x.bytes.data() + (row + r) * w.padded_columns + g * kGroup;
      const int32_t offset = w.format == Format::q4 ? -8 * x.sums[at] : 0;
      const I16 dot = w.format == Format::q8 ? dot_group(group, bytes, x.sums[at]) : dot_nibbles(group, bytes, offset);
      acc[r] = fma(mul(to_float(dot), scale), set1(x.scales[at]), acc[r]);
      if (w.format == Format::q4m)
        acc[r] = fma(load_half(group + weights + 32), set1(x.scales[at] * static_cast<float>(x.sums[at])), acc[r]);
    }
  }
  for (int r = 0; r < R; ++r) {
    alignas(64) float out[16];
    store(out, acc[r]);
    std::copy(out, out + width, y + r * stride);
  }
}

template <int R>
void rows(const Matrix& w, const uint8_t* block, const Rows& x, std::ptrdiff_t row, float* y, std::ptrdiff_t stride,
          std::ptrdiff_t width) {
  const float* floats = x.floats.data() + row * w.padded_columns;
  if (w.quantized()) {
    quantized_rows<R>(w, block, x, row, y, stride, width);
  } else if (w.format == Format::bf16) {
    float_rows<R, true>(w, block, floats, w.padded_columns, y, stride, width);
  } else {
    float_rows<R, false>(w, block, floats, w.padded_columns, y, stride, width);
  }
}

}  // namespace

void gemm_blocks(const Matrix& w, std::ptrdiff_t expert, const Rows& x, float* y, std::ptrdiff_t stride,
                 std::ptrdiff_t first, std::ptrdiff_t end) {
  for (std::ptrdiff_t b = first; b < end; ++b) {
    const uint8_t* block = w.block(expert, b);
    const std::ptrdiff_t width = std::min(kBlock, w.rows - b * kBlock);
    float* out = y + b * kBlock;
    std::ptrdiff_t row = 0;
    for (; row + 4 <= x.count; row += 4) rows<4>(w, block, x, row, out + row * stride, stride, width);
    for (; row < x.count; ++row) rows<1>(w, block, x, row, out + row * stride, stride, width);
  }
}

void quantize_rows(const float* x, std::ptrdiff_t columns, std::ptrdiff_t first, std::ptrdiff_t end, Rows& out) {
  const std::ptrdiff_t groups = out.columns / kGroup;
  for (std::ptrdiff_t r = first; r < end; ++r) {
    for (std::ptrdiff_t g = 0; g < groups; ++g) {
      alignas(64) float values[kGroup] = {};
      const std::ptrdiff_t have = std::min(kGroup, columns - g * kGroup);
      std::copy(x + r * columns + g * kGroup, x + r * columns + g * kGroup + have, values);
      const V16 a = load(values), b = load(values + 16);
      const float largest = max_of(max(max(a, sub(zero(), a)), max(b, sub(zero(), b))));
      const float scale = largest / 127.0f, inverse = largest > 0 ? 127.0f / largest : 0.0f;
      int8_t* bytes = out.bytes.data() + r * out.columns + g * kGroup;
      store(values, round(mul(a, set1(inverse))));
      store(values + 16, round(mul(b, set1(inverse))));
      int32_t total = 0;
      for (std::ptrdiff_t k = 0; k < kGroup; ++k) {
        bytes[k] = static_cast<int8_t>(values[k]);
        total += bytes[k];
      }
      out.scales[static_cast<size_t>(r * groups + g)] = scale;
      out.sums[static_cast<size_t>(r * groups + g)] = total;
    }
  }
}

}  // namespace redraft::ISA
