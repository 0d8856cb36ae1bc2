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

// One call: where rows go, and which rows of which slots.
struct Call {
  Cache keys, values;
  Index windows;
  const int64_t *slots, *starts, *positions;
  float scale;
  std::optional<Rotation> rotation;

  Call(const Any& keys, const Any& values, const Ints& slots, const Ints& starts, const Ints& positions, float scale,
       const std::optional<In>& cos, const std::optional<In>& sin)
      : keys(keys), values(values), windows(dim(slots, 0)), slots(slots.data()), starts(starts.data()),
        positions(positions.data()), scale(scale) {
    if (cos) rotation = Rotation{cos->data(), sin->data(), dim(*cos, 1)};
  }
};

// The new rows of all windows go to their places, keys rotated where there are angles.
void store_rows(const Call& call, const Strided& k, const std::optional<Strided>& v) {
  const Cache &keys = call.keys, &values = call.values;
  for_rows(k.rows, 2 * k.width, [&](Index first, Index end) {
    std::vector<float> rotated(static_cast<size_t>(call.rotation ? k.width : 0));
    for (Index w = 0; w < call.windows; ++w) {
      const Index last = std::min<Index>(end, call.starts[w + 1]);
      for (Index row = std::max<Index>(first, call.starts[w]); row < last; ++row) {
        const Index slot = call.slots[w], position = call.positions[row];
        if (call.rotation) (*call.rotation)(row, k.row(row), rotated.data(), keys.groups, keys.width);
        const float* key = call.rotation ? rotated.data() : k.row(row);
        for (Index g = 0; g < keys.groups; ++g) {
          keys.write(slot, position, g, key + g * keys.width);
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

void attend(const Call& call, const Strided& q, Index heads, float* out) {
  static thread_local std::vector<float> copies;
  const Cache &keys = call.keys, &values = call.values;
  AttentionShape shape{};
  shape.heads = heads;
  shape.groups = keys.groups;
  shape.key_dim = keys.width;
  shape.value_dim = values.width;
  shape.key_step = keys.step;
  shape.value_step = values.step;
  shape.scale = call.scale;
  shape.half = keys.half;
  if (shape.key_dim > kMaxKeyDim || shape.value_dim > kMaxValueDim) throw std::invalid_argument("head too wide");
  const float* queries = rotated_queries(q, call.rotation, heads, copies);
  const Index per_group = shape.heads / shape.groups;
  // Large pieces share more; there should still be two for each thread.
  const Index share = q.rows * shape.groups / (2 * num_threads());
  const Index rows_a_piece = std::max<Index>(1, std::min(share, kAttentionQueries / per_group));
  struct Piece {
    Index slot, first, end, head, end_head;
  };
  std::vector<Piece> pieces;
  Index work = 0;
  for (Index w = 0; w < call.windows; ++w) {
    for (Index row = call.starts[w]; row < call.starts[w + 1]; row += rows_a_piece) {
      const Index end = std::min<Index>(call.starts[w + 1], row + rows_a_piece);
      work += (call.positions[end - 1] + 1) * shape.key_dim * (end - row) * shape.heads;
      for (Index group = 0; group < shape.heads; group += per_group)
        for (Index head = group; head < group + per_group; head += kAttentionQueries)
          pieces.push_back({call.slots[w], row, end, head, std::min(group + per_group, head + kAttentionQueries)});
    }
  }
  const auto run = [&](const Piece& piece) {
    AttentionQuery piece_queries[kAttentionQueries];
    Index count = 0;
    for (Index row = piece.first; row < piece.end; ++row) {
      for (Index head = piece.head; head < piece.end_head; ++head) {
        const Index at = row * shape.heads + head;
        piece_queries[count++] = {queries + at * shape.key_dim, out + at * shape.value_dim, call.positions[row] + 1};
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

void py_attention(Any q, std::optional<Any> k, std::optional<Any> v, Any keys, Any values, Ints slots, Ints starts,
                  Ints positions, float scale, std::optional<In> cos, std::optional<In> sin, Out out) {
  const Call call(keys, values, slots, starts, positions, scale, cos, sin);
  if (k) store_rows(call, rows_apart(*k), v ? std::optional(rows_apart(*v)) : std::nullopt);
  attend(call, rows_apart(q), dim(q, 1), out.data());
}

void py_attention_block(Any x, const Matrix& qkv, std::optional<In> qkv_bias, const Matrix& out,
                        std::optional<In> out_bias, Index heads, float scale, std::optional<In> cos,
                        std::optional<In> sin, Any keys, Any values, Ints slots, Ints starts, Ints positions,
                        std::optional<In> norm, float eps, std::optional<In> residual, Out y) {
  static thread_local std::vector<float> copies, projected, attended;
  const Call call(keys, values, slots, starts, positions, scale, cos, sin);
  const Strided rows = rows_apart(x);
  const Index step = qkv.rows, queries = heads * call.keys.width, key_numbers = call.keys.groups * call.keys.width;
  projected.resize(static_cast<size_t>(rows.rows * step));
  attended.resize(static_cast<size_t>(rows.rows * heads * call.values.width));
  product(qkv, dense_rows(rows, data_of(norm), eps, copies), rows.rows, data_of(qkv_bias), nullptr, projected.data());
  const auto part = [&](Index first, Index width) {
    return Strided{projected.data() + first, rows.rows, width, step};
  };
  store_rows(call, part(queries, key_numbers), part(queries + key_numbers, step - queries - key_numbers));
  attend(call, part(0, queries), heads, attended.data());
  product(out, attended.data(), rows.rows, data_of(out_bias), data_of(residual), y.data());
}

}  // namespace

void bind_attention(nb::module_& m) {
  const auto none = [](const char* name) { return nb::arg(name).none(); };
  m.def("attention", &py_attention, nb::arg("q"), none("k"), none("v"), nb::arg("keys"), nb::arg("values"),
        nb::arg("slots"), nb::arg("starts"), nb::arg("positions"), nb::arg("scale"), none("cos"), none("sin"),
        nb::arg("out"), NoLock());
  m.def("attention_block", &py_attention_block, nb::arg("x"), nb::arg("qkv"), none("qkv_bias"), nb::arg("out"),
        none("out_bias"), nb::arg("heads"), nb::arg("scale"), none("cos"), none("sin"), nb::arg("keys"),
        nb::arg("values"), nb::arg("slots"), nb::arg("starts"), nb::arg("positions"), none("norm"), nb::arg("eps"),
        none("residual"), nb::arg("y"), NoLock());
}

}  // namespace redraft
