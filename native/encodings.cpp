#include "encodings.h"

#include <cstring>

namespace redraft {
namespace {

inline uint16_t half_at(const uint8_t* source) {
  uint16_t value;
  std::memcpy(&value, source, 2);
  return value;
}

// Low nibbles are the first numbers, high nibbles the others.
void split_nibbles(const uint8_t* source, std::ptrdiff_t count, uint8_t* numbers) {
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    numbers[i] = source[i] & 15;
    numbers[count + i] = source[i] >> 4;
  }
}

// Eight scales and eight minima of 6 bits in 12 bytes: the upper bits of the last four of each stand above the first.
void six_bit_scales(const uint8_t* source, FileBlock& out) {
  for (int i = 0; i < 4; ++i) {
    const uint8_t scale = source[i], minimum = source[4 + i], rest = source[8 + i];
    out.scales[i] = scale & 63;
    out.minima[i] = minimum & 63;
    out.scales[4 + i] = static_cast<uint8_t>((rest & 15) | scale >> 6 << 4);
    out.minima[4 + i] = static_cast<uint8_t>(rest >> 4 | minimum >> 6 << 4);
  }
}

void read_q4k_or_q5k(const uint8_t* source, bool five_bits, FileBlock& out) {
  out.scale = half_at(source);
  out.minimum = half_at(source + 2) ^ 0x8000;
  six_bit_scales(source + 4, out);
  const uint8_t *upper = source + 16, *nibbles = source + (five_bits ? 48 : 16);
  for (int pair = 0; pair < 4; ++pair) split_nibbles(nibbles + 32 * pair, 32, out.numbers + 64 * pair);
  if (!five_bits) return;
  for (int g = 0; g < 8; ++g)
    for (int k = 0; k < 32; ++k) out.numbers[32 * g + k] |= static_cast<uint8_t>((upper[k] >> g & 1) << 4);
}

void read_q6k(const uint8_t* source, FileBlock& out) {
  std::memcpy(out.scales, source + 192, 16);
  out.scale = half_at(source + 208);
  for (int part = 0; part < 2; ++part) {  // 128 numbers each
    uint8_t* numbers = out.numbers + 128 * part;
    split_nibbles(source + 64 * part, 64, numbers);
    for (int i = 0; i < 128; ++i)
      numbers[i] |= static_cast<uint8_t>((source[128 + 32 * part + i % 32] >> i / 32 * 2 & 3) << 4);
  }
}

}  // namespace

void read_block(Format format, const uint8_t* source, FileBlock& out) {
  switch (format) {
    case Format::q4k:
    case Format::q5k: return read_q4k_or_q5k(source, format == Format::q5k, out);
    case Format::q6k: return read_q6k(source, out);
    default: break;
  }
  out.scale = half_at(source);
  if (format == Format::q8) std::memcpy(out.numbers, source + 2, 32);
  if (format == Format::q4) split_nibbles(source + 2, 16, out.numbers);
  if (format == Format::q4m) {
    out.minimum = half_at(source + 2);
    split_nibbles(source + 4, 16, out.numbers);
  }
}

}  // namespace redraft
