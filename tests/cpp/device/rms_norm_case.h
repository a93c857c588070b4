// An all_reduce_rms_norm of any values: the arrays of all ranks, and whether results are those of
// the three operations one by one.
#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "device/cluster.h"
#include "memory/codec.h"

namespace jaxfabric::device {

template <class Codec>
class RmsNormCase {
 public:
  using Storage = typename Codec::Storage;

  static std::string TypeName() {
    if constexpr (std::is_same_v<Codec, PlainCodec<float>>) return "float32";
    return std::is_same_v<Codec, Float16Codec> ? "float16" : "bfloat16";
  }

  RmsNormCase(std::mt19937_64& random, uint32_t ranks, uint64_t rows, uint32_t row_bytes)
      : rows_(rows), hidden_(row_bytes / static_cast<uint32_t>(sizeof(Storage))) {
    const uint64_t count = rows * hidden_;
    in_place_ = random() % 2 == 0;
    equal_residuals_ = random() % 2 == 0;
    weight_ = Random(random, hidden_);
    Bytes residual = Random(random, count);
    for (uint32_t r = 0; r < ranks; ++r) {
      Arrays& own = rank_.emplace_back();
      own.input = Random(random, count);
      own.residual = Random(random, count);
      own.output = Random(random, count);
      own.new_residual = Random(random, count);
      if (equal_residuals_) std::memcpy(own.residual.data(), residual.data(), residual.size());
      for (uint64_t i = 0; i < count; ++i) {
        own.given.push_back(Element(own.input, i));
        own.added.push_back(Element(own.residual, i));
      }
    }
  }

  RmsNormArguments Arguments(Cluster& cluster, uint32_t position, uint32_t header) {
    Arrays& own = rank_[position];
    return {cluster.View(position),
            header,
            hidden_,
            own.input.data(),
            own.residual.data(),
            weight_.data(),
            Output(position).data(),
            NewResidual(position).data(),
            rows_,
            kEpsilon};
  }
  bool equal_residuals() const { return equal_residuals_; }
  Bytes& Output(uint32_t rank) { return in_place_ ? rank_[rank].input : rank_[rank].output; }
  Bytes& NewResidual(uint32_t rank) {
    return in_place_ ? rank_[rank].residual : rank_[rank].new_residual;
  }

  testing::AssertionResult Check(uint32_t rank) {
    for (uint64_t row = 0; row < rows_; ++row) {
      const uint64_t begin = row * hidden_;
      double squares = 0;
      for (uint64_t i = begin; i < begin + hidden_; ++i) {
        float sum = rank_[0].given[i];
        for (size_t other = 1; other < rank_.size(); ++other) sum += rank_[other].given[i];
        const float rounded = Codec::Load(Codec::Store(sum));
        const float stored = Codec::Load(Codec::Store(rounded + rank_[rank].added[i]));
        if (Element(NewResidual(rank), i) != stored) {
          return Wrong("new residual", rank, i, Element(NewResidual(rank), i), stored);
        }
        squares += double{stored} * stored;
      }
      const double scale = 1 / std::sqrt(squares / hidden_ + double{kEpsilon});
      for (uint64_t i = begin; i < begin + hidden_; ++i) {
        const double exact = Element(NewResidual(rank), i) * scale * Element(weight_, i - begin);
        const double got = Element(Output(rank), i);
        // Negated, so that a NaN is wrong.
        if (!(std::abs(got - exact) <= std::abs(exact) * Tolerance() + 1e-7)) {
          return Wrong("output", rank, i, got, exact);
        }
      }
    }
    if (Output(rank).GuardsIntact() && NewResidual(rank).GuardsIntact()) {
      return testing::AssertionSuccess();
    }
    return testing::AssertionFailure() << "rank " << rank << ": guards";
  }

 private:
  static constexpr float kEpsilon = 1e-5f;
  struct Arrays {
    Bytes input{0}, residual{0}, output{0}, new_residual{0};
    std::vector<float> given, added;  // the input and the residual, which results may replace
  };

  static double Tolerance() {
    if constexpr (sizeof(Storage) == 4) return 1e-6;
    return std::is_same_v<Codec, Float16Codec> ? 1e-3 : 8e-3;
  }
  static float Element(Bytes& array, uint64_t i) {
    Storage value;
    std::memcpy(&value, array.data() + i * sizeof(Storage), sizeof(Storage));
    return Codec::Load(value);
  }
  static Bytes Random(std::mt19937_64& random, uint64_t count) {
    Bytes array(count * sizeof(Storage),
                static_cast<uint32_t>(random() % 16 / sizeof(Storage) * sizeof(Storage)));
    for (uint64_t i = 0; i < count; ++i) {
      const auto value = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 256;
      const Storage stored = Codec::Store(value);
      std::memcpy(array.data() + i * sizeof(Storage), &stored, sizeof(Storage));
    }
    return array;
  }
  testing::AssertionResult Wrong(const char* what, uint32_t rank, uint64_t i, double got,
                                 double exact) const {
    return testing::AssertionFailure()
           << what << " of rank " << rank << ", row " << i / hidden_ << " of " << rows_
           << ", element " << i % hidden_ << ": " << got << ", not " << exact;
  }

  uint64_t rows_;
  uint32_t hidden_;
  bool in_place_, equal_residuals_;
  Bytes weight_{0};
  std::vector<Arrays> rank_;
};

}  // namespace jaxfabric::device
