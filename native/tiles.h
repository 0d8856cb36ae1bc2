// Tile registers: their configuration, and an order between them and ordinary memory accesses.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace redraft::amx {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, std::ptrdiff_t count, int bytes) {
    bytes_per_row[tile] = static_cast<uint16_t>(bytes);
    rows[tile] = static_cast<uint8_t>(count);
  }
};

// The compiler does not know that tile instructions read and write memory: what was written before must be there.
inline void settle() { __asm__ volatile("" : : : "memory"); }

inline void configure(const TileConfig& config) {
  settle();
  _tile_loadconfig(&config);
}

}  // namespace redraft::amx
