// Attention rows by slot and position: storing them, and attending to them.
#include "arrays.h"
#include "halves.h"

namespace redraft {
namespace {

// Key or value rows [S, context, G, D] of float32, or of bf16 as uint16; only the last axis is dense.
struct Cache {
  void* data;
  bool half;
  Index slot_step, step, group_step;  // numbers from one slot, position and key head to the next
  Index groups, width;

  explicit Cache(const Any& a)
      : data(a.data()), half(a.dtype() == nb::dtype<uint16_t>()), slot_step(a.stride(0)), step(a.stride(1)),
        group_step(a.stride(2)), groups(dim(a, 2)), width(dim(a, 3)) {}

  uint8_t* at(Index slot, Index position, Index group) const {
    return static_cast<uint8_t*>(data) + (slot * slot_step + position * step + group * group_step) * (half ? 2 : 4);
  }

  void write(Index slot, Index position, Index group, const float* row) const {
    if (!half) {
      std::copy_n(row, width, reinterpret_cast<float*>(at(slot, position, group)));
      return;
    }
    auto* out = reinterpret_cast<uint16_t*>(at(slot, position, group));
    for (Index i = 0; i < width; ++i) out[i] = float_to_bf16(row[i]);
  }
};

// Angles of each row, where heads are rotated.
struct Rotation {
  const float *cos, *sin;
  Index half;

  void operator()(Index row, const float* x, float* y, Index heads, Index dim) const {
    kernels().rope(x, cos + row * half, sin + row * half, y, heads, dim, half);
  }
};

// The new rows of all windows go to their places, keys rotated where there are angles.
void store_rows(const Strided& k, const std::optional<Strided>& v, const std::optional<Rotation>& rotation,
                const Cache& keys, const Cache& values, const Ints& slots, const Ints& starts, const Ints& positions) {
  const Index windows = dim(slots, 0);
  for_rows(k.rows, 2 * k.width, [&](Index first, Index end) {
    std::vector<float> rotated(static_cast<size_t>(rotation ? k.width : 0));
    for (Index w = 0; w < windows; ++w) {
      for (Index row = std::max(first, starts.data()[w]); row < std::min(end, starts.data()[w + 1]); ++row) {
        const Index slot = slots.data()[w], position = positions.data()[row];
        const float* key = k.row(row);
        if (rotation) (*rotation)(row, key, rotated.data(), keys.groups, keys.width);
        for (Index g = 0; g < keys.groups; ++g) {
          keys.write(slot, position, g, (rotation ? rotated.data() : key) + g * keys.width);
          if (v) values.write(slot, position, g, v->row(row) + g * values.width);
        }
      }
    }
  });
}

const float* rotated_queries(const Strided& q, const std::optional<Rotation>& rotation, Index heads,
                             std::vector<float>& copies) {
  if (!rotation) return dense_rows(q, nullptr, 0, copies);
  copies.resize(static_cast<size_t>(q.rows * q.width));
  float* out = copies.data();
  for_rows(q.rows, q.width, [&](Index first, Index end) {
    for (Index r = first; r < end; ++r) (*rotation)(r, q.row(r), out + r * q.width, heads, q.width / heads);
  });
  return out;
}

void py_attention(Any q, std::optional<Any> k, std::optional<Any> v, Any key_rows, Any value_rows, Ints slots,
                  Ints starts, Ints positions, float scale, std::optional<In> cos, std::optional<In> sin, Out out) {
  static thread_local std::vector<float> copies;
  const Cache keys(key_rows), values(value_rows);
  std::optional<Rotation> rotation;
  if (cos) rotation = Rotation{cos->data(), sin->data(), dim(*cos, 1)};
  AttentionShape shape{};
  shape.heads = dim(q, 1);
  shape.groups = keys.groups;
  shape.key_dim = keys.width;
  shape.value_dim = values.width;
  shape.key_step = keys.step;
  shape.value_step = values.step;
  shape.scale = scale;
  shape.half = keys.half;
  if (shape.key_dim > kMaxKeyDim || shape.value_dim > kMaxValueDim) throw std::invalid_argument("head too wide");
  if (k) {
    std::optional<Strided> v_rows;
    if (v) v_rows = rows_apart(*v);
    store_rows(rows_apart(*k), v_rows, rotation, keys, values, slots, starts, positions);
  }
  const float* queries = rotated_queries(rows_apart(q), rotation, shape.heads, copies);
  const Index windows = dim(slots, 0), per_group = shape.heads / shape.groups;
  // Large pieces share more; there should still be two for each thread.
  const Index share = dim(q, 0) * shape.groups / (2 * num_threads());
  const Index rows_a_piece = std::max<Index>(1, std::min(share, kAttentionQueries / per_group));
  struct Piece {
    Index slot, first, end, head, end_head;
  };
  std::vector<Piece> pieces;
  Index work = 0;
  for (Index w = 0; w < windows; ++w) {
    for (Index row = starts.data()[w]; row < starts.data()[w + 1]; row += rows_a_piece) {
      const Index end = std::min(starts.data()[w + 1], row + rows_a_piece);
      work += (positions.data()[end - 1] + 1) * shape.key_dim * (end - row) * shape.heads;
      for (Index group = 0; group < shape.heads; group += per_group)
        for (Index head = group; head < group + per_group; head += kAttentionQueries)
          pieces.push_back({slots.data()[w], row, end, head, std::min(group + per_group, head + kAttentionQueries)});
    }
  }
  const auto run = [&](const Piece& piece) {
    AttentionQuery piece_queries[kAttentionQueries];
    Index count = 0;
    for (Index row = piece.first; row < piece.end; ++row) {
      for (Index head = piece.head; head < piece.end_head; ++head) {
        const Index at = row * shape.heads + head;
        piece_queries[count++] = {queries + at * shape.key_dim, out.data() + at * shape.value_dim, positions.data()[row] + 1};
      }
    }
    const Index group = piece.head / per_group;
    kernels().attention(shape, piece_queries, count, keys.at(piece.slot, 0, group), values.at(piece.slot, 0, group));
  };
  const auto some = [&](Index first, Index end) {
    for (Index i = first; i < end; ++i) run(pieces[static_cast<size_t>(i)]);
  };
  if (work < kWorthThreads) {
    some(0, static_cast<Index>(pieces.size()));
  } else {
    parallel_for(static_cast<Index>(pieces.size()), 1, some);
  }
}

}  // namespace

void bind_attention(nb::module_& m) {
  const auto none = [](const char* name) { return nb::arg(name).none(); };
  m.def("attention", &py_attention, nb::arg("q"), none("k"), none("v"), nb::arg("keys"), nb::arg("values"),
        nb::arg("slots"), nb::arg("starts"), nb::arg("positions"), nb::arg("scale"), none("cos"), none("sin"),
        nb::arg("out"), NoLock());
}

}  // namespace redraft
