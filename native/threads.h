// A pool of threads for short parallel sections. Work is taken in chunks, so that a section never waits for a thread
// that the system has put aside: whoever is awake does what is left.
#pragma once

#include <cstddef>
#include <functional>

namespace redraft {

// Number of threads that may share a section, the caller included.
int num_threads();

// Change it. Not while a section runs.
void set_num_threads(int count);

// Call body(first, end) for parts of [0, count), cut at multiples of `grain`, on whichever threads are free; return
// when all is done. How the range is cut and who does which part must not change any result. Sections do not nest.
void parallel_for(std::ptrdiff_t count, std::ptrdiff_t grain,
                  const std::function<void(std::ptrdiff_t, std::ptrdiff_t)>& body);

}  // namespace redraft
