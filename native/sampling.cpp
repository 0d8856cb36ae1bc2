// Which scores can be the largest after standard Gumbel noise −log(−log(uniform)), from Philox 4×64-10.
#include <nanobind/stl/pair.h>

#include <cmath>
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

// All indices whose noisy score comes within the margin of the largest, ascending: nearly always one. Most are ruled
// out by the bound; the caller decides between the others with the logarithms of its specification.
Candidates py_noisy_candidates(Doubles scores, uint64_t seed, uint64_t position) {
  const double* score = scores.data();
  const Index size = dim(scores, 0);
  const auto least = [](double best) { return best - kMargin * (1 + std::fabs(best)); };
  uint64_t words[4];
  const Index likeliest = std::max_element(score, score + size) - score;
  philox(static_cast<uint64_t>(likeliest / 4 + 1), position, seed, words);
  double best = score[likeliest] + gumbel(words[likeliest % 4]);
  std::vector<std::pair<double, std::pair<int64_t, uint64_t>>> found;
  for (Index first = 0; first < size; first += 4) {
    philox(static_cast<uint64_t>(first / 4 + 1), position, seed, words);
    for (Index i = first; i < std::min(size, first + 4); ++i) {
      const uint64_t word = words[i - first];
      if (score[i] + bound(word) < least(best)) continue;
      const double noisy = score[i] + gumbel(word);
      if (noisy < least(best)) continue;
      best = std::max(best, noisy);
      found.push_back({noisy, {i, word}});
    }
  }
  Candidates result;
  for (const auto& [noisy, candidate] : found)
    if (!(noisy < least(best))) result.push_back(candidate);
  return result;
}

}  // namespace

void bind_sampling(nb::module_& m) { m.def("noisy_candidates", &py_noisy_candidates, NoLock()); }

}  // namespace redraft
