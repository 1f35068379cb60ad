// A mixture of experts whose weights are held in panels, as those of linear layers are.
#include <optional>

#include "experts.h"
#include "groups.h"
#include "int8.h"
#include "program.h"

namespace quire {
namespace {

// One expert's weight (kernels/cpu/experts.py); what a kind does not have is null.
struct ExpertWeight {
  const void* packed;
  const void* scales;
  const uint16_t* zeros;
  const int32_t* totals;
  const int32_t* order;
  const float* bias;
  float factor;
};

enum class Kind : int32_t { DENSE, INT8, NIBBLES, BYTES, FLOAT8 };

// All experts' weights of one projection.
struct Projection {
  const ExpertWeight* experts;
  const bf16* levels;
  int64_t outputs, columns, inputs, group;
  Kind kind;
  bool amx;
};

// Where the rows of each run begin, in rows; those that are laid out in blocks fill them.
std::vector<int64_t> row_begins(const Routed& routed, bool amx) {
  std::vector<int64_t> begins{0};
  for (const ExpertRun& run : routed.runs())
    begins.push_back(begins.back() + (amx && run.count > BLOCK_ROWS ? (run.count + 31) / 32 * 32
                                                                     : run.count));
  return begins;
}

// What all kinds tell of themselves.
class Panels {
 public:
  explicit Panels(const Projection& all) : all_(all) {}
  int64_t outputs() const { return all_.outputs; }
  int64_t inputs() const { return all_.inputs; }
  const Projection& all() const { return all_; }

 private:
  const Projection& all_;
};

// Rows as dense products read them.
class RowsOfRuns {
 public:
  RowsOfRuns(const Panels& experts, const Routed& routed)
      : all_(experts.all()),
        runs_(routed.runs()),
        begins_(row_begins(routed, all_.amx)),
        rows_(begins_.back() * all_.inputs) {}

  void put(size_t run, int64_t r, const bfloat16* row) {
    lay_row(reinterpret_cast<const bf16*>(row), r, layout(run), rows_.get() + at(run));
  }
  DenseRows of(size_t run) const {
    return {rows_.get() + at(run), all_.inputs, all_.amx, layout(run)};
  }
  int64_t max_part(size_t run) const { return of(run).max_part(); }
  int64_t count(size_t run) const { return runs_[run].count; }

 private:
  BlockLayout layout(size_t run) const {
    return DenseRows::layout_of(runs_[run].count, all_.inputs, all_.amx);
  }
  int64_t at(size_t run) const { return begins_[run] * all_.inputs; }

  const Projection& all_;
  const std::vector<ExpertRun>& runs_;
  const std::vector<int64_t> begins_;
  const Scratch<DenseRows::Value> rows_;
};

class DenseExperts : public Panels {
 public:
  using Panels::Panels;
  using Rows = RowsOfRuns;

  class Products {
   public:
    explicit Products(const Projection& all) : all_(all) {}

    void multiply(const Rows& rows, size_t run, int64_t expert, int64_t begin, int64_t end,
                  float* y, int64_t panel) {
      const ExpertWeight& weight = all_.experts[expert];
      const bf16* packed = static_cast<const bf16*>(weight.packed) + panel * PANEL * all_.inputs;
      const Results<float> to{y, all_.outputs, all_.outputs};
      products_.multiply(rows.of(run), begin, end, packed, weight.bias, to, panel);
    }

   private:
    const Projection& all_;
    DenseProducts products_;
  };

  Products products() const { return Products(all()); }
};

class Int8Experts : public Panels {
 public:
  using Panels::Panels;

  class Rows {
   public:
    Rows(const Panels& experts, const Routed& routed)
        : all_(experts.all()),
          runs_(routed.runs()),
          begins_(row_begins(routed, all_.amx)),
          codes_(begins_.back() * all_.inputs),
          told_(begins_.back()) {}

    void put(size_t run, int64_t r, const bfloat16* row) {
      const BlockLayout laid = layout(run);
      uint8_t* codes = codes_.get() + begins_[run] * all_.inputs + laid.offset(r, 0);
      told_.get()[begins_[run] + r] =
          quantise(reinterpret_cast<const bf16*>(row), all_.inputs, codes, laid.step);
    }
    Int8Rows of(size_t run) const {
      return {codes_.get() + begins_[run] * all_.inputs, told_.get() + begins_[run], all_.inputs,
              all_.amx, layout(run)};
    }
    int64_t max_part(size_t run) const { return of(run).max_part(); }

   private:
    BlockLayout layout(size_t run) const {
      return Int8Rows::layout_of(runs_[run].count, all_.inputs, all_.amx);
    }

    const Projection& all_;
    const std::vector<ExpertRun>& runs_;
    const std::vector<int64_t> begins_;
    const Scratch<uint8_t> codes_;
    const Scratch<RoundedRow> told_;
  };

  class Products {
   public:
    explicit Products(const Projection& all) : all_(all) {}

    void multiply(const Rows& rows, size_t run, int64_t expert, int64_t begin, int64_t end,
                  float* y, int64_t panel) {
      const ExpertWeight& of = all_.experts[expert];
      const Int8Weight weight{static_cast<const int8_t*>(of.packed),
                              static_cast<const float*>(of.scales), of.totals};
      const Results<float> to{y, all_.outputs, all_.outputs};
      products_.multiply(rows.of(run), begin, end, weight.panel(panel, all_.inputs), of.bias, to,
                         panel);
    }

   private:
    const Projection& all_;
    Int8Products products_;
  };

  Products products() const { return Products(all()); }
};

template <class Code>
class GroupedExperts : public Panels {
 public:
  using Panels::Panels;

  class Rows {
   public:
    Rows(const Panels& experts, const Routed& routed)
        : all_(experts.all()),
          routed_(routed),
          rows_(experts, routed),
          groups_(all_.inputs / all_.group),
          totals_(routed.num_pairs() * groups_) {}

    void put(size_t run, int64_t r, const bfloat16* row) {
      const ExpertWeight& weight = all_.experts[routed_.runs()[run].expert];
      std::optional<Scratch<bfloat16>> moved;
      if (weight.order) {
        moved.emplace(all_.inputs);
        for (int64_t k = 0; k < all_.columns; ++k) moved->get()[k] = row[weight.order[k]];
        std::fill(moved->get() + all_.columns, moved->get() + all_.inputs, bfloat16{});
        row = moved->get();
      }
      rows_.put(run, r, row);
      if (weight.zeros && are_few(run))
        add_groups(reinterpret_cast<const bf16*>(row), 1, all_.inputs, all_.group,
                   totals(run) + r * groups_);
    }
    GroupedRows of(size_t run) const { return {rows_.of(run), rows_.count(run), totals(run)}; }
    int64_t max_part(size_t run) const { return of(run).max_part(); }

   private:
    bool are_few(size_t run) const { return rows_.count(run) <= IN_REGISTER; }
    float* totals(size_t run) const {
      return totals_.get() + routed_.runs()[run].begin * groups_;
    }

    const Projection& all_;
    const Routed& routed_;
    RowsOfRuns rows_;
    const int64_t groups_;
    const Scratch<float> totals_;
  };

  class Products {
   public:
    explicit Products(const Projection& all) : all_(all) {}

    void multiply(const Rows& rows, size_t run, int64_t expert, int64_t begin, int64_t end,
                  float* y, int64_t panel) {
      const ExpertWeight& of = all_.experts[expert];
      const GroupedWeight weight{static_cast<const uint32_t*>(of.packed),
                                 static_cast<const uint16_t*>(of.scales),
                                 of.zeros,
                                 all_.levels,
                                 all_.inputs,
                                 all_.group,
                                 of.factor};
      const Results<float> to{y, all_.outputs, all_.outputs};
      products_.multiply(rows.of(run), begin, end, weight, of.bias, to, panel);
    }

   private:
    const Projection& all_;
    GroupedProducts<Code> products_;
  };

  Products products() const { return Products(all()); }
};

// Calls body(experts), by the kind of what holds their weights.
template <class Body>
void with_experts(const Projection& all, Body body) {
  switch (all.kind) {
    case Kind::DENSE: return body(DenseExperts(all));
    case Kind::INT8: return body(Int8Experts(all));
    case Kind::NIBBLES: return body(GroupedExperts<Nibbles>(all));
    case Kind::BYTES: return body(GroupedExperts<Bytes>(all));
    case Kind::FLOAT8: return body(GroupedExperts<Float8>(all));
  }
}

}  // namespace
}  // namespace quire

// Activations in bfloat16.
extern "C" void quire_panel_experts(const quire::Mixture* mixture, const quire::Projection* gate_up,
                                    const quire::Projection* down, const void* x,
                                    const int64_t* ids, const float* weights, const void* shared,
                                    void* out, int64_t tokens) {
  using namespace quire;
  const MixtureRows rows{x, ids, weights, shared, out, tokens};
  mix<bfloat16>(*mixture, rows, [&](bool is_down, const Routed& routed,
                                    const FillRow<bfloat16>& fill, float* y) {
    with_experts(is_down ? *down : *gate_up, [&](const auto& experts) {
      project<std::decay_t<decltype(experts)>, bfloat16>(experts, routed, fill, y);
    });
  });
}

// out[tokens][heads][outputs, kept] = x[tokens][heads][columns, kept], of which the columns are
// multiplied by their head's weight and those behind them copied. Heads are a layer's experts to
// which all tokens go. Strides are in values.
extern "C" void quire_panel_heads(const quire::Projection* weights, const void* x,
                                  int64_t token_stride, int64_t head_stride, int64_t tokens,
                                  int64_t heads, int64_t kept, void* out) {
  using namespace quire;
  const int64_t pairs = tokens * heads, outputs = weights->outputs, columns = weights->columns;
  const auto row = [&](int64_t pair) {
    return static_cast<const bfloat16*>(x) + pair / heads * token_stride +
           pair % heads * head_stride;
  };
  std::vector<int64_t> ids(pairs);
  for (int64_t i = 0; i < pairs; ++i) ids[i] = i % heads;
  const Routed routed(ids.data(), pairs, heads);
  const Scratch<float> made(pairs * outputs);
  const FillRow<bfloat16> fill = [&](int64_t place, bfloat16* to) {
    std::copy_n(row(routed.pair_at(place)), columns, to);
  };
  with_experts(*weights, [&](const auto& experts) {
    project<std::decay_t<decltype(experts)>, bfloat16>(experts, routed, fill, made.get());
  });
  const int64_t width = outputs + kept;
  parallel_rows(pairs, std::max<int64_t>(1, EXPERT_GRAIN / width), [&](int64_t i, int64_t end) {
    for (; i < end; ++i) {
      const float* from = made.get() + routed.place_of(i) * outputs;
      bfloat16* to = static_cast<bfloat16*>(out) + i * width;
      for (int64_t n = 0; n < outputs; n += LANES)
        store(to + n, load(from + n, outputs - n), outputs - n);
      std::copy_n(row(i) + columns, kept, to + outputs);
    }
  });
}

QUIRE_RECORDED(quire_panel_experts)
QUIRE_RECORDED(quire_panel_heads)
