// Which scores can be the largest after standard Gumbel noise −log(−log(uniform)), from Philox 4×64-10.
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <utility>

#include "arrays.h"

namespace redraft {
namespace {

using Doubles = nb::ndarray<const double, nb::c_contig, nb::device::cpu>;
using Candidates = std::vector<std::pair<int64_t, uint64_t>>;  // index and random word

constexpr double kMargin = 1e-9;  // far above what any two libraries' logarithms differ by

// Four words of the block with this counter and key.
void philox(uint64_t count, uint64_t position, uint64_t seed, uint64_t* out) {
  uint64_t c[4] = {count, position, 0, 0}, key[2] = {seed, 0};
  for (int round = 0; round < 10; ++round) {
    const auto first = static_cast<unsigned __int128>(0xD2E7470EE14C6C93u) * c[0];
    const auto second = static_cast<unsigned __int128>(0xCA5A826395121157u) * c[2];
    const uint64_t next[4] = {static_cast<uint64_t>(second >> 64) ^ c[1] ^ key[0], static_cast<uint64_t>(second),
                              static_cast<uint64_t>(first >> 64) ^ c[3] ^ key[1], static_cast<uint64_t>(first)};
    std::copy(next, next + 4, c);
    key[0] += 0x9E3779B97F4A7C15u;
    key[1] += 0xBB67AE8584CAA73Bu;
  }
  std::copy(c, c + 4, out);
}

double gumbel(uint64_t word) {
  return -std::log(-std::log((static_cast<double>(word >> 11) + 0.5) * 0x1p-53));
}

// At least the noise of a word, without a logarithm: −log(−log u) ≤ −log(1 − u), and 1 − u ≥ 2^(bits − 54).
double bound(uint64_t word) {
  const uint64_t rest = ~word >> 11;  // 1 − u = (rest + ½) · 2^−53
  const int bits = rest == 0 ? 0 : 64 - __builtin_clzll(rest);
  return (54 - bits) * 0.6932;
}

struct Noisy {
  double score;
  int64_t index;
  uint64_t word;
};

double least(double best) { return best - kMargin * (1 + std::fabs(best)); }

// Those of blocks [first, end) of four indices that may be the largest, given that `best` is reached.
void search(const double* score, Index size, Index first, Index end, uint64_t seed, uint64_t position, double best,
            std::vector<Noisy>& found) {
  uint64_t words[4];
  for (Index block = first; block < end; ++block) {
    philox(static_cast<uint64_t>(block + 1), position, seed, words);
    for (Index i = 4 * block; i < std::min(size, 4 * block + 4); ++i) {
      const uint64_t word = words[i % 4];
      if (score[i] + bound(word) < least(best)) continue;
      const Noisy noisy{score[i] + gumbel(word), i, word};
      best = std::max(best, noisy.score);
      found.push_back(noisy);
    }
  }
}

// All indices whose noisy score comes within the margin of the largest, ascending: nearly always one. Most are ruled
// out by the bound; the caller decides between the others with the logarithms of its specification. `likeliest`: the
// index of the largest score, from which the search starts.
Candidates py_noisy_candidates(Doubles scores, Index likeliest, uint64_t seed, uint64_t position) {
  const double* score = scores.data();
  const Index size = dim(scores, 0);
  uint64_t words[4];
  philox(static_cast<uint64_t>(likeliest / 4 + 1), position, seed, words);
  const double start = score[likeliest] + gumbel(words[likeliest % 4]);
  std::mutex merging;
  std::vector<Noisy> found;
  for_rows((size + 3) / 4, 16, [&](Index first, Index end) {
    std::vector<Noisy> own;
    search(score, size, first, end, seed, position, start, own);
    std::lock_guard<std::mutex> lock(merging);
    found.insert(found.end(), own.begin(), own.end());
  });
  double best = start;
  for (const Noisy& noisy : found) best = std::max(best, noisy.score);
  Candidates result;
  for (const Noisy& noisy : found)
    if (noisy.score >= least(best)) result.emplace_back(noisy.index, noisy.word);
  std::sort(result.begin(), result.end());
  return result;
}

}  // namespace

void bind_sampling(nb::module_& m) { m.def("noisy_candidates", &py_noisy_candidates, NoLock()); }

}  // namespace redraft
