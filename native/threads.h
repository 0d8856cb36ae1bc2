// A pool of threads for short parallel sections: workers spin for a while between sections, then sleep.
#pragma once

#include <cstddef>
#include <functional>

namespace redraft {

// Number of threads that run a section, the caller included.
int num_threads();

// Change it. Not while a section runs.
void set_num_threads(int count);

// Call body(thread) once on each thread, and return when all are done. Sections do not nest.
void on_all_threads(const std::function<void(int)>& body);

// Call body(first, end) for parts of [0, count), one part a thread, cut at multiples of `grain`.
// How the range is cut must not change any result.
void parallel_for(std::ptrdiff_t count, std::ptrdiff_t grain,
                  const std::function<void(std::ptrdiff_t, std::ptrdiff_t)>& body);

}  // namespace redraft
