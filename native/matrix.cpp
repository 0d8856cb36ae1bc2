#include "matrix.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "halves.h"
#include "threads.h"

namespace redraft {
namespace {

std::ptrdiff_t round_up(std::ptrdiff_t value, std::ptrdiff_t unit) { return (value + unit - 1) / unit * unit; }

struct Encoding {
  Format format;
  std::ptrdiff_t row_unit, unit_bytes;  // numbers in a unit of the file's rows, and its bytes
};

Encoding encoding_named(const std::string& name) {
  if (name == "F32") return {Format::f32, 1, 4};
  if (name == "F16" || name == "BF16") return {Format::bf16, 1, 2};
  if (name == "Q8_0") return {Format::q8, 32, 34};
  if (name == "Q4_0") return {Format::q4, 32, 18};
  if (name == "Q4_1") return {Format::q4m, 32, 20};
  throw std::invalid_argument("unknown encoding " + name);
}

// Where weight (n of the block, k) of a 4-bit group lies: byte, and whether it is the upper nibble.
inline uint8_t* nibble_byte(uint8_t* group, std::ptrdiff_t n, std::ptrdiff_t k) {
  const std::ptrdiff_t low = k % 16;
  return group + (low / 4 * kBlock + n) * 4 + low % 4;
}

void pack_quantized(const Matrix& m, uint8_t* block, std::ptrdiff_t n, const uint8_t* row) {
  const std::ptrdiff_t size = group_bytes(m.format);
  for (std::ptrdiff_t g = 0; g < m.columns / kGroup; ++g) {
    uint8_t* group = block + g * size;
    if (m.format == Format::q8) {
      const uint8_t* source = row + g * 34;
      for (std::ptrdiff_t k = 0; k < kGroup; ++k) group[(k / 4 * kBlock + n) * 4 + k % 4] = source[2 + k];
      std::memcpy(group + 512 + 2 * n, source, 2);
      continue;
    }
    const std::ptrdiff_t head = m.format == Format::q4 ? 2 : 4;
    const uint8_t* source = row + g * (16 + head);
    for (std::ptrdiff_t k = 0; k < 16; ++k) *nibble_byte(group, n, k) = source[head + k];
    std::memcpy(group + 256 + 2 * n, source, 2);
    if (m.format == Format::q4m) std::memcpy(group + 288 + 2 * n, source + 2, 2);
  }
}

void pack_row(const Matrix& m, uint8_t* block, std::ptrdiff_t n, const uint8_t* row, bool half) {
  if (m.quantized()) {
    pack_quantized(m, block, n, row);
  } else if (m.format == Format::f32) {
    for (std::ptrdiff_t k = 0; k < m.columns; ++k) std::memcpy(block + (k * kBlock + n) * 4, row + 4 * k, 4);
  } else {
    for (std::ptrdiff_t k = 0; k < m.columns; ++k) {
      uint16_t value;
      std::memcpy(&value, row + 2 * k, 2);
      if (half) value = float_to_bf16(half_to_float(value));
      std::memcpy(block + ((k / 2 * kBlock + n) * 2 + k % 2) * 2, &value, 2);
    }
  }
}

}  // namespace

std::ptrdiff_t group_bytes(Format format) {
  switch (format) {
    case Format::q8: return 512 + 32;
    case Format::q4: return 256 + 32;
    case Format::q4m: return 256 + 64;
    default: return 0;
  }
}

std::unique_ptr<Matrix> pack(const void* data, const std::string& encoding, std::ptrdiff_t experts,
                             std::ptrdiff_t rows, std::ptrdiff_t columns) {
  const Encoding from = encoding_named(encoding);
  if (columns % from.row_unit) throw std::invalid_argument("rows do not hold whole blocks");
  const std::ptrdiff_t padded_rows = round_up(rows, kBlock), padded_columns = round_up(columns, kGroup);
  std::ptrdiff_t block_bytes = padded_columns * kBlock * (from.format == Format::f32 ? 4 : 2);
  if (from.format >= Format::q8) block_bytes = padded_columns / kGroup * group_bytes(from.format);
  const std::ptrdiff_t blocks = experts * (padded_rows / kBlock), total = round_up(blocks * block_bytes, 64);
  auto* memory = static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>(total)));
  if (memory == nullptr) throw std::bad_alloc();
  auto matrix = std::unique_ptr<Matrix>(new Matrix{from.format, experts, rows, columns, padded_rows, padded_columns,
                                                   block_bytes, total, {memory, std::free}});
  const auto* source = static_cast<const uint8_t*>(data);
  const std::ptrdiff_t row_bytes = columns / from.row_unit * from.unit_bytes;
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
  const std::ptrdiff_t n = row % kBlock, size = group_bytes(m.format);
  for (std::ptrdiff_t k = 0; k < m.columns; ++k) {
    uint8_t* group = const_cast<uint8_t*>(block) + k / kGroup * size;
    uint16_t value = 0;
    if (m.format == Format::f32) {
      std::memcpy(out + k, block + (k * kBlock + n) * 4, 4);
      continue;
    }
    if (m.format == Format::bf16) {
      std::memcpy(&value, block + ((k / 2 * kBlock + n) * 2 + k % 2) * 2, 2);
      out[k] = bf16_to_float(value);
      continue;
    }
    const std::ptrdiff_t j = k % kGroup;
    if (m.format == Format::q8) {
      std::memcpy(&value, group + 512 + 2 * n, 2);
      out[k] = half_to_float(value) * static_cast<float>(static_cast<int8_t>(group[(j / 4 * kBlock + n) * 4 + j % 4]));
      continue;
    }
    const int nibble = *nibble_byte(group, n, j) >> (j < 16 ? 0 : 4) & 15;
    std::memcpy(&value, group + 256 + 2 * n, 2);
    const float scale = half_to_float(value);
    if (m.format == Format::q4) {
      out[k] = scale * static_cast<float>(nibble - 8);
      continue;
    }
    std::memcpy(&value, group + 288 + 2 * n, 2);
    out[k] = scale * static_cast<float>(nibble) + half_to_float(value);
  }
}

}  // namespace redraft
