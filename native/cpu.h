// What this processor can do, and which of it is used.
#pragma once

#include <string>

namespace redraft {

enum class Isa { none, avx2, avx512, amx };

// The best instruction set of this processor and operating system.
Isa best_isa();

// The one in use: the best, or a lower one that was asked for.
Isa isa();

// Use a lower one. False, and nothing changed, if the name is unknown or the processor lacks it.
bool use_isa(const std::string& name);

std::string isa_name(Isa value);

}  // namespace redraft
