#include "cpu.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <array>

namespace redraft {
namespace {

// Tile registers have to be asked for, once a process (Linux, since 5.16).
bool amx_permitted() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

Isa detect() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::none;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  if (!avx512) return Isa::avx2;
  unsigned a = 7, b = 0, c = 0, d = 0;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  const bool amx = (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);  // bf16, tile, int8
  return amx && amx_permitted() ? Isa::amx : Isa::avx512;
}

const std::array<std::string, 4> kNames = {"none", "avx2", "avx512", "amx"};

Isa& current() {
  static Isa value = best_isa();
  return value;
}

}  // namespace

Isa best_isa() {
  static const Isa value = detect();
  return value;
}

Isa isa() { return current(); }

bool use_isa(const std::string& name) {
  for (int i = 1; i <= static_cast<int>(best_isa()); ++i) {
    if (kNames[i] == name) {
      current() = static_cast<Isa>(i);
      return true;
    }
  }
  return false;
}

std::string isa_name(Isa value) { return kNames[static_cast<int>(value)]; }

}  // namespace redraft
