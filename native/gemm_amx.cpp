// Products with tile registers, up to 16 rows a tile. What a tile computes for a row does not depend on how many rows
// it has, and reading the weights costs the same for one row as for sixteen.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "gemm.h"

namespace redraft::amx {
namespace {

constexpr std::ptrdiff_t kAhead = 4096;  // bytes that weights are asked for before they are needed
constexpr std::ptrdiff_t kFewRows = 4;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// The compiler does not know that tile instructions read memory: what was written before must be there.
inline void write_through() { __asm__ volatile("" : : : "memory"); }

// Tiles 0, 1 hold sums of the first rows, 2, 3 of the next ones; 4 and 5 their activations; 6, 7 weights.
void configure(std::ptrdiff_t rows, std::ptrdiff_t next_rows, int activation_bytes, int weight_rows) {
  TileConfig config;
  const auto set = [&](int tile, std::ptrdiff_t count, int bytes) {
    config.bytes_per_row[tile] = static_cast<uint16_t>(bytes);
    config.rows[tile] = static_cast<uint8_t>(count);
  };
  for (int tile : {0, 1}) set(tile, rows, 64);
  for (int tile : {2, 3}) set(tile, next_rows, 64);
  set(4, rows, activation_bytes);
  set(5, next_rows, activation_bytes);
  for (int tile : {6, 7}) set(tile, weight_rows, 64);
  write_through();
  _tile_loadconfig(&config);
}

void copy_out(const float* tile, float* y, std::ptrdiff_t stride, std::ptrdiff_t rows, std::ptrdiff_t width) {
  for (std::ptrdiff_t r = 0; r < rows; ++r) std::copy(tile + 16 * r, tile + 16 * r + width, y + r * stride);
}

// Rows [m, m + 32) against two blocks of outputs, whose weights are read once.
void bf16_pair(const uint8_t* w0, const uint8_t* w1, const uint16_t* a, std::ptrdiff_t columns, bool both) {
  const std::ptrdiff_t row_bytes = columns * 2;
  _tile_zero(0);
  _tile_zero(1);
  if (both) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::ptrdiff_t k = 0; k < columns; k += 32) {
    for (int line = 0; line < 1024; line += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(w0 + k * 32 + kAhead + line), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(w1 + k * 32 + kAhead + line), _MM_HINT_T0);
    }
    _tile_loadd(4, a + k, row_bytes);
    _tile_loadd(6, w0 + k * 32, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w1 + k * 32, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (both) {
      _tile_loadd(5, a + 16 * columns + k, row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

void bf16_blocks(const Matrix& w, std::ptrdiff_t expert, const Rows& x, float* y, std::ptrdiff_t stride,
                 std::ptrdiff_t first, std::ptrdiff_t end) {
  alignas(64) float out[4][256];
  std::ptrdiff_t configured = -1;
  for (std::ptrdiff_t b = first; b < end; b += 2) {
    const bool pair = b + 1 < end;
    const uint8_t *w0 = w.block(expert, b), *w1 = w.block(expert, pair ? b + 1 : b);
    for (std::ptrdiff_t m = 0; m < x.count; m += 32) {
      const std::ptrdiff_t left = std::min<std::ptrdiff_t>(32, x.count - m);
      const std::ptrdiff_t rows[2] = {std::min<std::ptrdiff_t>(16, left), std::max<std::ptrdiff_t>(left - 16, 0)};
      if (left != configured) configure(rows[0], std::max<std::ptrdiff_t>(rows[1], 1), 64, 16);
      configured = left;
      bf16_pair(w0, w1, x.halves.data() + m * x.columns, x.columns, rows[1] > 0);
      _tile_stored(0, out[0], 64);
      _tile_stored(1, out[1], 64);
      if (rows[1] > 0) {
        _tile_stored(2, out[2], 64);
        _tile_stored(3, out[3], 64);
      }
      for (int part = 0; part < (pair ? 4 : 3); part += pair ? 1 : 2) {
        const std::ptrdiff_t block = b + part % 2, row = m + part / 2 * 16;
        copy_out(out[part], y + row * stride + block * kBlock, stride, rows[part / 2],
                 std::min(kBlock, w.rows - block * kBlock));
      }
    }
  }
  _tile_release();
}

// The tile rows of a group: in place, or unpacked from nibbles to signed bytes.
inline const int8_t* group_tile(Format format, const uint8_t* group, int8_t* buffer) {
  if (format == Format::q8) return reinterpret_cast<const int8_t*>(group);
  const __m512i mask = _mm512_set1_epi8(15);
  const __m512i shift = _mm512_set1_epi8(format == Format::q4 ? 8 : 0);
  for (int r = 0; r < 4; ++r) {
    const __m512i q = _mm512_loadu_si512(group + 64 * r);
    _mm512_store_si512(buffer + 64 * r, _mm512_sub_epi8(_mm512_and_si512(q, mask), shift));
    const __m512i upper = _mm512_and_si512(_mm512_srli_epi16(q, 4), mask);
    _mm512_store_si512(buffer + 64 * (r + 4), _mm512_sub_epi8(upper, shift));
  }
  write_through();
  return buffer;
}

template <bool kMinima>
void scale_group(__m512* acc, const int32_t* sums, const uint8_t* scales, const Rows& x, std::ptrdiff_t row,
                 std::ptrdiff_t rows, std::ptrdiff_t groups, std::ptrdiff_t g) {
  const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales)));
  __m512 minimum = _mm512_setzero_ps();
  if (kMinima) minimum = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + 32)));
  for (std::ptrdiff_t r = 0; r < rows; ++r) {
    const std::ptrdiff_t at = (row + r) * groups + g;
    const __m512 dot = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums + 16 * r)), scale);
    acc[r] = _mm512_fmadd_ps(dot, _mm512_set1_ps(x.scales[at]), acc[r]);
    if (kMinima)
      acc[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x.scales[at] * static_cast<float>(x.sums[at])), acc[r]);
  }
}

template <bool kMinima>
void int8_blocks(const Matrix& w, std::ptrdiff_t expert, const Rows& x, float* y, std::ptrdiff_t stride,
                 std::ptrdiff_t first, std::ptrdiff_t end) {
  alignas(64) int8_t unpacked[2][512];
  alignas(64) int32_t sums[2][256];
  alignas(64) float out[16];
  const std::ptrdiff_t columns = w.padded_columns, groups = columns / kGroup, size = group_bytes(w.format);
  const std::ptrdiff_t weights = w.format == Format::q8 ? 512 : 256;
  std::ptrdiff_t configured = 0;
  for (std::ptrdiff_t b = first; b < end; ++b) {
    const uint8_t* block = w.block(expert, b);
    const std::ptrdiff_t width = std::min(kBlock, w.rows - b * kBlock);
    for (std::ptrdiff_t m = 0; m < x.count; m += 16) {
      const std::ptrdiff_t rows = std::min<std::ptrdiff_t>(16, x.count - m);
      if (rows != configured) configure(configured = rows, rows, 32, 8);
      __m512 acc[16];
      for (std::ptrdiff_t r = 0; r < rows; ++r) acc[r] = _mm512_setzero_ps();
      const int8_t* a = x.bytes.data() + m * columns;
      for (std::ptrdiff_t g = 0; g < groups; g += 2) {
        const uint8_t* group = block + g * size;
        const bool pair = g + 1 < groups;
        for (std::ptrdiff_t line = 0; line < 2 * size; line += 64)
          _mm_prefetch(reinterpret_cast<const char*>(group + kAhead + line), _MM_HINT_T0);
        _tile_zero(0);
        _tile_loadd(4, a + g * kGroup, columns);
        _tile_loadd(6, group_tile(w.format, group, unpacked[0]), 64);
        _tile_dpbssd(0, 4, 6);
        if (pair) {
          _tile_zero(1);
          _tile_loadd(5, a + (g + 1) * kGroup, columns);
          _tile_loadd(7, group_tile(w.format, group + size, unpacked[1]), 64);
          _tile_dpbssd(1, 5, 7);
        }
        _tile_stored(0, sums[0], 64);
        scale_group<kMinima>(acc, sums[0], group + weights, x, m, rows, groups, g);
        if (!pair) continue;
        _tile_stored(1, sums[1], 64);
        scale_group<kMinima>(acc, sums[1], group + size + weights, x, m, rows, groups, g + 1);
      }
      for (std::ptrdiff_t r = 0; r < rows; ++r) {
        _mm512_store_ps(out, acc[r]);
        std::copy(out, out + width, y + (m + r) * stride + b * kBlock);
      }
    }
  }
  _tile_release();
}

}  // namespace

void gemm_blocks(const Matrix& w, std::ptrdiff_t expert, const Rows& x, float* y, std::ptrdiff_t stride,
                 std::ptrdiff_t first, std::ptrdiff_t end) {
  write_through();
  const bool few = w.format >= Format::q4 && x.count <= kFewRows;  // same bits, and nibbles need no unpacking
  if (w.format == Format::f32 || few) {
    avx512::gemm_blocks(w, expert, x, y, stride, first, end);
  } else if (w.format == Format::bf16) {
    bf16_blocks(w, expert, x, y, stride, first, end);
  } else if (w.format == Format::q4m) {
    int8_blocks<true>(w, expert, x, y, stride, first, end);
  } else {
    int8_blocks<false>(w, expert, x, y, stride, first, end);
  }
}

void round_rows(const float* x, std::ptrdiff_t columns, std::ptrdiff_t first, std::ptrdiff_t end, Rows& out) {
  for (std::ptrdiff_t r = first; r < end; ++r) {
    uint16_t* row = out.halves.data() + r * out.columns;
    for (std::ptrdiff_t k = 0; k < out.columns; k += 16) {
      const std::ptrdiff_t have = std::max<std::ptrdiff_t>(0, std::min<std::ptrdiff_t>(16, columns - k));
      const auto mask = static_cast<__mmask16>((1u << have) - 1);
      const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x + r * columns + k));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + k), reinterpret_cast<const __m256i&>(rounded));
    }
  }
}

}  // namespace redraft::amx
