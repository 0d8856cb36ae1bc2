// The delta-rule scan, a block of value columns at a time.
#include <algorithm>

#include "lanes.h"

namespace redraft::ISA {
namespace {

#ifdef __AVX512F__
constexpr int kParts = kScanColumns / 16;  // registers side by side, which share what is broadcast
constexpr bool kFuse = true;               // the sums of two tokens fit the registers
#else
constexpr int kParts = 1;
constexpr bool kFuse = false;
#endif

// Columns of one head's state, rows by key: the unit of the scan, small enough for the L1 cache.
template <int P>
struct Block {
  alignas(64) float s[kMaxKeyDim][16 * P];
};

// Where rows of a block's columns lie: in the block, or in the state itself where the columns are whole.
struct Rows {
  float* data;
  Index step;

  float* row(Index i) const { return data + i * step; }
};

template <int P>
Rows rows_of(Block<P>& block) {
  return {block.s[0], 16 * P};
}

// Numbers of the block's columns.
template <int P>
struct Columns {
  V16 part[P];
};

template <int P>
Columns<P> load_columns(const float* p, Index width) {
  Columns<P> result;
  for (int j = 0; j < P; ++j) result.part[j] = load_some(p + 16 * j, std::min<Index>(16, width - 16 * j));
  return result;
}

template <int P>
void store_columns(const Columns<P>& x, float* p, Index width) {
  for (int j = 0; j < P; ++j) {
    if (width >= 16 * (j + 1)) {
      store(p + 16 * j, x.part[j]);
    } else {
      alignas(64) float lanes[16];
      store(lanes, x.part[j]);
      std::copy(lanes, lanes + (width - 16 * j), p + 16 * j);
    }
  }
}

template <int P>
void load_block(Block<P>& block, const float* state, Index keys, Index values, Index width) {
  for (Index i = 0; i < keys; ++i)
    for (int j = 0; j < P; ++j)
      store(block.s[i] + 16 * j, load_some(state + i * values + 16 * j, std::min<Index>(16, width - 16 * j)));
}

template <int P>
void store_block(const Block<P>& block, float* state, Index keys, Index values, Index width) {
  for (Index i = 0; i < keys; ++i) store_columns(load_columns<P>(block.s[i], 16 * P), state + i * values, width);
}

// Rows in four interleaved chains, i mod 4, so that sums do not wait for each other; f(row, chain). Inlined, so that
// the sums stay in registers.
template <class F>
[[gnu::always_inline]] inline void for_keys(Index keys, const F& f) {
  Index i = 0;
  for (; i + 4 <= keys; i += 4) {
    f(i, 0);
    f(i + 1, 1);
    f(i + 2, 2);
    f(i + 3, 3);
  }
  if (i < keys) f(i, 0);
  if (i + 1 < keys) f(i + 1, 1);
  if (i + 2 < keys) f(i + 2, 2);
}

// The block that is next: each pass over this one has a few of its rows brought nearer.
struct Ahead {
  const float* row;
  Index rows, values, lines, rows_a_pass;

  void fetch() {
    const Index some = std::min(rows, rows_a_pass);
    for (Index r = 0; r < some; ++r, row += values)
      for (Index line = 0; line < lines; ++line) __builtin_prefetch(row + 16 * line, 1, 2);
    rows -= some;
  }
};

// Four sums of each column.
template <int P>
struct Chains {
  V16 chain[4][P];

  Chains() {
    for (auto& parts : chain)
      for (V16& part : parts) part = zero();
  }
  Columns<P> sum() const {
    Columns<P> result;
    for (int j = 0; j < P; ++j)
      result.part[j] = add(add(chain[0][j], chain[1][j]), add(chain[2][j], chain[3][j]));
    return result;
  }
};

// What happens to the state at one token, or when its record is folded.
struct Token {
  const float *k, *q, *decay;
  Index decay_step;

  V16 decay_of(Index i) const { return set1(decay[i * decay_step]); }
};

// S ← diag(decay) S + k uᵀ, the operations of the scan below in their order: folding gives the bits of scanning.
// Reads `from`; writes the block, and `to` where there is one.
template <int P, int N>
void fold(Block<P>& block, const Token* records, const Columns<P>* u, Index keys, Rows from, const Rows* to) {
  for (Index i = 0; i < keys; ++i) {
    V16 s[P];
    for (int j = 0; j < P; ++j) s[j] = load(from.row(i) + 16 * j);
    for (int n = 0; n < N; ++n) {
      const V16 decay = records[n].decay_of(i), k = set1(records[n].k[i]);
      for (int j = 0; j < P; ++j) s[j] = fma(k, u[n].part[j], mul(s[j], decay));
    }
    for (int j = 0; j < P; ++j) {
      store(block.s[i] + 16 * j, s[j]);
      if (to != nullptr) store(to->row(i) + 16 * j, s[j]);
    }
  }
}

// S ← diag(decay) S, read from `from` → Sᵀk.
template <int P>
Columns<P> decay_and_read(Block<P>& block, const Token& token, Index keys, Rows from) {
  Chains<P> read;
  for_keys(keys, [&](Index i, int chain) __attribute__((always_inline)) {
    const V16 decay = token.decay_of(i), k = set1(token.k[i]);
    for (int j = 0; j < P; ++j) {
      const V16 s = mul(load(from.row(i) + 16 * j), decay);
      store(block.s[i] + 16 * j, s);
      read.chain[chain][j] = fma(k, s, read.chain[chain][j]);
    }
  });
  return read.sum();
}

// S ← S + k uᵀ, written to `to` → Sᵀq.
template <int P>
Columns<P> update(Block<P>& block, const Token& token, const Columns<P>& u, Index keys, Rows to) {
  Chains<P> out;
  for_keys(keys, [&](Index i, int chain) __attribute__((always_inline)) {
    const V16 k = set1(token.k[i]), q = set1(token.q[i]);
    for (int j = 0; j < P; ++j) {
      const V16 s = fma(k, u.part[j], load(block.s[i] + 16 * j));
      store(to.row(i) + 16 * j, s);
      out.chain[chain][j] = fma(q, s, out.chain[chain][j]);
    }
  });
  return out.sum();
}

// The update of one token and the decay and reading of the next, in one pass over the state → Sᵀq; Sᵀk → read.
template <int P>
Columns<P> update_and_read(Block<P>& block, const Token& token, const Columns<P>& u, const Token& next, Index keys,
                           Columns<P>& read) {
  Chains<P> out, reading;
  for_keys(keys, [&](Index i, int chain) __attribute__((always_inline)) {
    const V16 k = set1(token.k[i]), q = set1(token.q[i]), decay = next.decay_of(i), next_k = set1(next.k[i]);
    for (int j = 0; j < P; ++j) {
      const V16 updated = fma(k, u.part[j], load(block.s[i] + 16 * j)), s = mul(updated, decay);
      store(block.s[i] + 16 * j, s);
      out.chain[chain][j] = fma(q, updated, out.chain[chain][j]);
      reading.chain[chain][j] = fma(next_k, s, reading.chain[chain][j]);
    }
  });
  read = reading.sum();
  return out.sum();
}

// One window on a block of columns of one head.
template <int P>
class Scanner {
 public:
  Scanner(const Scan& call, const ScanWindow& window, Index head, Index column, Index width)
      : call_(call), window_(window), head_(head), key_head_(head * call.shape.heads / call.shape.value_heads),
        column_(column), width_(width) {}

  void run() {
    const auto& [heads, value_heads, keys, values, decay_dim] = call_.shape;
    const Index slot_size = value_heads * keys * values, planes = std::max<Index>(call_.num_planes, 1);
    float* slot = call_.state + window_.slot * planes * slot_size + head_ * keys * values + column_;
    float* start = slot + (call_.num_planes ? window_.plane * slot_size : 0);
    const bool whole = width_ == 16 * P;
    const Rows state{start, values}, block = rows_of(block_);
    if (!whole) load_block(block_, start, keys, values, width_);
    Ahead ahead = next_block(start);
    Rows from = whole ? state : block;
    if (window_.num_folded + window_.num_replayed) {
      fold_records(from, whole && window_.num_folded ? &state : nullptr);
      if (!whole && window_.num_folded) store_block(block_, start, keys, values, width_);
      from = block;
    }
    Columns<P> read{};
    if (window_.first < window_.end) read = decay_and_read(block_, token(window_.first), keys, from);
    for (Index row = window_.first; row < window_.end; ++row) {
      const Columns<P> u = correction(row, read);
      Columns<P> out;
      const bool more = row + 1 < window_.end;
      ahead.fetch();
      if (kFuse && more && !call_.num_planes) {
        out = update_and_read(block_, token(row), u, token(row + 1), keys, read);
      } else {
        out = update(block_, token(row), u, keys, whole && window_.advance && !more ? state : block);
        keep(row, u, slot, slot_size);
        if (more) read = decay_and_read(block_, token(row + 1), keys, block);
      }
      store_columns(out, call_.out + values_at(row), width_);
      if (!window_.advance && !call_.num_planes) record(row, u);
    }
    if (!whole && window_.advance) store_block(block_, start, keys, values, width_);
  }

 private:
  Index values_at(Index row) const { return (row * call_.shape.value_heads + head_) * call_.shape.value_dim + column_; }

  Token token(Index row) const {
    const Index key = (row * call_.shape.heads + key_head_) * call_.shape.key_dim, d = call_.shape.decay_dim;
    const float* decay = call_.decay + (row * call_.shape.value_heads + head_) * d;
    return {call_.k + key, call_.q + key, decay, d == 1 ? 0 : 1};
  }

  Index record_at(Index index) const { return window_.slot * call_.num_records + index; }

  // u = β (v − Sᵀk).
  Columns<P> correction(Index row, const Columns<P>& read) const {
    Columns<P> u = load_columns<P>(call_.v + values_at(row), width_);
    const V16 beta = set1(call_.beta[row * call_.shape.value_heads + head_]);
    for (int j = 0; j < P; ++j) u.part[j] = mul(beta, sub(u.part[j], read.part[j]));
    return u;
  }

  void fold_records(Rows from, const Rows* state) {
    const Index count = window_.num_folded + window_.num_replayed, d = call_.shape.decay_dim;
    for (Index first = 0; first < count; first += 4) {
      const Index some = std::min<Index>(4, count - first);
      Token records[4];
      Columns<P> u[4];
      for (Index n = 0; n < some; ++n) {
        const Index at = record_at(first + n);
        records[n] = {call_.record_k + (at * call_.shape.heads + key_head_) * call_.shape.key_dim, nullptr,
                      call_.record_decay + (at * call_.shape.value_heads + head_) * d, d == 1 ? 0 : 1};
        u[n] = load_columns<P>(call_.record_u + values_at(at), width_);
      }
      const Rows* to = first + some == count ? state : nullptr;
      const Index keys = call_.shape.key_dim;
      switch (some) {
        case 1: fold<P, 1>(block_, records, u, keys, from, to); break;
        case 2: fold<P, 2>(block_, records, u, keys, from, to); break;
        case 3: fold<P, 3>(block_, records, u, keys, from, to); break;
        default: fold<P, 4>(block_, records, u, keys, from, to);
      }
      from = rows_of(block_);
    }
  }

  void record(Index row, const Columns<P>& u) const {
    const Index at = record_at(window_.num_replayed + row - window_.first);
    store_columns(u, call_.record_u + values_at(at), width_);
  }

  // With planes: the state after a token goes to its own, or the token to the tail.
  void keep(Index row, const Columns<P>& u, float* slot, Index slot_size) const {
    if (window_.advance || !call_.num_planes) return;
    const Index plane = (window_.plane + 1 + row - window_.first) % call_.num_planes;
    if (plane == window_.last) {
      store_columns(u, call_.record_u + values_at(record_at(0)), width_);
    } else {
      store_block(block_, slot + plane * slot_size, call_.shape.key_dim, call_.shape.value_dim, width_);
    }
  }

  Ahead next_block(const float* start) const {
    const Index keys = call_.shape.key_dim, values = call_.shape.value_dim;
    const bool last = column_ + 16 * P >= values;
    const float* next = last ? start - column_ + keys * values : start + 16 * P;
    const Index rows = last && head_ + 1 == call_.shape.value_heads ? 0 : keys;
    const Index passes = std::max<Index>(1, window_.end - window_.first);
    return {next, rows, values, P, (keys + passes - 1) / passes};
  }

  const Scan& call_;
  const ScanWindow& window_;
  Index head_, key_head_, column_, width_;
  Block<P> block_;
};

}  // namespace

void scan(const Scan& call, const ScanWindow& window, Index head, Index column) {
  const Index end = std::min(call.shape.value_dim, column + kScanColumns);
  for (; column < end; column += 16 * kParts) {
    if (end - column > 16) {
      Scanner<kParts>(call, window, head, column, std::min<Index>(16 * kParts, end - column)).run();
    } else {
      Scanner<1>(call, window, head, column, end - column).run();
    }
  }
}

}  // namespace redraft::ISA
