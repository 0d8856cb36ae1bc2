#include "matrix.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "encodings.h"
#include "halves.h"
#include "threads.h"

namespace redraft {
namespace {

std::ptrdiff_t round_up(std::ptrdiff_t value, std::ptrdiff_t unit) { return (value + unit - 1) / unit * unit; }

Format format_of(const std::string& encoding) {
  if (encoding == "F32") return Format::f32;
  if (encoding == "F16" || encoding == "BF16") return Format::bf16;
  if (encoding == "Q8_0") return Format::q8;
  if (encoding == "Q4_0") return Format::q4;
  if (encoding == "Q4_1") return Format::q4m;
  if (encoding == "Q4_K") return Format::q4k;
  if (encoding == "Q5_K") return Format::q5k;
  if (encoding == "Q6_K") return Format::q6k;
  throw std::invalid_argument("unknown encoding " + encoding);
}

inline uint32_t word_at(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

inline void add_bits(uint8_t* p, uint32_t bits) {
  bits |= word_at(p);
  std::memcpy(p, &bits, 4);
}

// The 32 numbers of a group for output n of the block, four at a time.
template <Format F>
void pack_numbers(uint8_t* group, std::ptrdiff_t n, const uint8_t* numbers) {
  for (std::ptrdiff_t r = 0; r < 8; ++r) {
    const uint32_t four = word_at(numbers + 4 * r);
    if (F == Format::q8) {
      add_bits(group + (r * kBlock + n) * 4, four);
    } else {
      add_bits(group + (r % 4 * kBlock + n) * 4, (four & 0x0f0f0f0f) << r / 4 * 4);
    }
    if (F == Format::q5k) {
      const uint32_t bits = (four >> 4 & 0x01010101) * 0x01020408 >> 24;  // one of each, side by side
      group[256 + 8 * r + n / 2] = static_cast<uint8_t>(group[256 + 8 * r + n / 2] | bits << n % 2 * 4);
    }
    if (F == Format::q6k) add_bits(group + 256 + r / 4 * 64 + n * 4, (four >> 4 & 0x03030303) << r % 4 * 2);
  }
}

int number_at(Format format, const uint8_t* group, std::ptrdiff_t n, std::ptrdiff_t k) {
  const std::ptrdiff_t r = k / 4, lane = n * 4 + k % 4;
  if (format == Format::q8) return static_cast<int8_t>(group[r * 64 + lane]);
  int number = group[r % 4 * 64 + lane] >> r / 4 * 4 & 15;
  if (format == Format::q5k) number |= (group[256 + 8 * r + lane / 8] >> lane % 8 & 1) << 4;
  if (format == Format::q6k) number |= (group[256 + r / 4 * 64 + lane] >> r % 4 * 2 & 3) << 4;
  return number - (format == Format::q4 ? 8 : format == Format::q6k ? 32 : 0);
}

void pack_scales(const Matrix& m, uint8_t* block, std::ptrdiff_t n, std::ptrdiff_t g, const FileBlock& from) {
  uint8_t* scales = block + m.scales_at + g * layout(m.format).scales;
  const std::ptrdiff_t i = g % kSuper;
  if (m.format == Format::q6k) {
    scales[n] = from.scales[2 * i];
    scales[16 + n] = from.scales[2 * i + 1];
  } else if (layout(m.format).super) {
    scales[n] = from.scales[i];
    scales[16 + n] = from.minima[i];
  } else {
    std::memcpy(scales + 2 * n, &from.scale, 2);
    if (has_minima(m.format)) std::memcpy(scales + 32 + 2 * n, &from.minimum, 2);
  }
}

template <Format F>
void pack_quantized(const Matrix& m, uint8_t* block, std::ptrdiff_t n, const uint8_t* row) {
  constexpr FileLayout file = file_layout(F);
  constexpr Layout sizes = layout(F);
  FileBlock from;
  for (std::ptrdiff_t first = 0; first < m.columns; first += file.numbers) {
    read_block(F, row + first / file.numbers * file.bytes, from);
    if (sizes.super) {
      uint8_t* super = block + first / (kSuper * kGroup) * sizes.super;
      std::memcpy(super + 2 * n, &from.scale, 2);
      if (has_minima(F)) std::memcpy(super + 32 + 2 * n, &from.minimum, 2);
    }
    for (std::ptrdiff_t i = 0; i < file.numbers / kGroup; ++i) {
      const std::ptrdiff_t g = first / kGroup + i;
      pack_scales(m, block, n, g, from);
      pack_numbers<F>(block + m.numbers_at + g * sizes.numbers, n, from.numbers + i * kGroup);
    }
  }
}

void pack_row(const Matrix& m, uint8_t* block, std::ptrdiff_t n, const uint8_t* row, bool half) {
  if (m.quantized()) {
    with_format(m.format, [&](auto format) { pack_quantized<format()>(m, block, n, row); });
  } else if (m.format == Format::f32) {
    for (std::ptrdiff_t k = 0; k < m.columns; ++k) std::memcpy(block + (k * kBlock + n) * 4, row + 4 * k, 4);
  } else {
    for (std::ptrdiff_t k = 0; k < m.columns; k += 2) {
      uint16_t pair[2] = {};
      std::memcpy(pair, row + 2 * k, static_cast<size_t>(std::min<std::ptrdiff_t>(2, m.columns - k)) * 2);
      if (half)
        for (uint16_t& value : pair) value = float_to_bf16(half_to_float(value));
      std::memcpy(block + (k / 2 * kBlock + n) * 4, pair, 4);
    }
  }
}

inline float half_at(const uint8_t* source, std::ptrdiff_t n) {
  uint16_t value;
  std::memcpy(&value, source + 2 * n, 2);
  return half_to_float(value);
}

struct Scale {
  float scale, minimum;
};

Scale scale_at(const Matrix& m, const Groups& groups, std::ptrdiff_t n, std::ptrdiff_t k) {
  const Layout sizes = layout(m.format);
  const uint8_t *scales = groups.scales + k / kGroup * sizes.scales,
                *super = groups.supers + k / (kSuper * kGroup) * sizes.super;
  switch (m.format) {
    case Format::q4m: return {half_at(scales, n), half_at(scales + 32, n)};
    case Format::q4k:
    case Format::q5k:
      return {half_at(super, n) * static_cast<float>(scales[n]),
              half_at(super + 32, n) * static_cast<float>(scales[16 + n])};
    case Format::q6k:
      return {half_at(super, n) * static_cast<float>(static_cast<int8_t>(scales[k % kGroup / 16 * 16 + n])), 0};
    default: return {half_at(scales, n), 0};
  }
}

}  // namespace

std::unique_ptr<Matrix> pack(const void* data, const std::string& encoding, std::ptrdiff_t experts,
                             std::ptrdiff_t rows, std::ptrdiff_t columns) {
  const Format format = format_of(encoding);
  const FileLayout file = file_layout(format);
  if (columns % file.numbers) throw std::invalid_argument("rows do not hold whole blocks");
  const std::ptrdiff_t padded_rows = round_up(rows, kBlock), padded_columns = round_up(columns, kGroup);
  const std::ptrdiff_t groups = padded_columns / kGroup;
  const Layout sizes = layout(format);
  const std::ptrdiff_t scales_at = groups / kSuper * sizes.super;
  const std::ptrdiff_t numbers_at = round_up(scales_at + groups * sizes.scales, 64);
  std::ptrdiff_t block_bytes = numbers_at + groups * sizes.numbers;
  if (format < Format::q8) block_bytes = padded_columns * kBlock * file.bytes;
  const std::ptrdiff_t blocks = experts * (padded_rows / kBlock), total = round_up(blocks * block_bytes, 64);
  auto* memory = static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>(total)));
  if (memory == nullptr) throw std::bad_alloc();
  auto matrix = std::unique_ptr<Matrix>(new Matrix{format, experts, rows, columns, padded_rows, padded_columns,
                                                   block_bytes, scales_at, numbers_at, total, {memory, std::free}});
  const auto* source = static_cast<const uint8_t*>(data);
  const std::ptrdiff_t row_bytes = columns / file.numbers * file.bytes;
  parallel_for(blocks, 1, [&](std::ptrdiff_t first, std::ptrdiff_t end) {
    for (std::ptrdiff_t b = first; b < end; ++b) {
      uint8_t* block = memory + b * block_bytes;
      std::memset(block, 0, static_cast<size_t>(block_bytes));
      const std::ptrdiff_t expert = b / (padded_rows / kBlock), top = b % (padded_rows / kBlock) * kBlock;
      for (std::ptrdiff_t n = 0; n < kBlock && top + n < rows; ++n)
        pack_row(*matrix, block, n, source + (expert * rows + top + n) * row_bytes, encoding == "F16");
    }
  });
  return matrix;
}

void unpack_row(const Matrix& m, std::ptrdiff_t row, float* out) {
  const uint8_t* block = m.block(0, row / kBlock);
  const Groups groups = m.groups(block);
  const std::ptrdiff_t n = row % kBlock;
  for (std::ptrdiff_t k = 0; k < m.columns; ++k) {
    if (m.format == Format::f32) {
      std::memcpy(out + k, block + (k * kBlock + n) * 4, 4);
    } else if (m.format == Format::bf16) {
      uint16_t value;
      std::memcpy(&value, block + ((k / 2 * kBlock + n) * 2 + k % 2) * 2, 2);
      out[k] = bf16_to_float(value);
    } else {
      const Scale by = scale_at(m, groups, n, k);
      const uint8_t* group = groups.numbers + k / kGroup * layout(m.format).numbers;
      const float value = by.scale * static_cast<float>(number_at(m.format, group, n, k % kGroup));
      out[k] = has_minima(m.format) ? value + by.minimum : value;
    }
  }
}

}  // namespace redraft
