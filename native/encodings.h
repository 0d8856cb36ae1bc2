// Blocks of quantized weights as GGUF files hold them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "matrix.h"

namespace redraft {

// Inputs of one output that a file keeps together: a group, or a super-block of eight.
struct FileBlock {
  uint8_t numbers[256];  // unsigned, except that those of q8 are signed
  uint8_t scales[16];    // of each group; of q6k for each half of it, signed
  uint8_t minima[8];
  uint16_t scale, minimum;  // half precision; the minimum with the sign that it is added with
};

struct FileLayout {
  std::ptrdiff_t numbers, bytes;
};

constexpr FileLayout file_layout(Format format) {
  switch (format) {
    case Format::f32: return {1, 4};
    case Format::bf16: return {1, 2};
    case Format::q8: return {32, 34};
    case Format::q4: return {32, 18};
    case Format::q4m: return {32, 20};
    case Format::q4k: return {256, 144};
    case Format::q5k: return {256, 176};
    case Format::q6k: return {256, 210};
  }
  return {1, 0};
}

// Read one block of a quantized format from where it lies in a file.
void read_block(Format format, const uint8_t* source, FileBlock& out);

}  // namespace redraft
