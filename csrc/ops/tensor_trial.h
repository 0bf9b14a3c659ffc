// A problem of the self-test of tensor operations, in memory. Compiled only with Metal.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../describe/calls.h"
#include "../plan/plan.h"
#include "tensor_memory.h"

namespace fattn {

// Operands of a prefill, a decode or a backward, and results of both kinds of kernels.
class Trial {
 public:
  // `problem`: sizes and options. The trial decides about batch, strides and lengths of sequences: a packed
  // call has a short sequence before a long one. Options that are tensors get numbers of their dtype.
  explicit Trial(const Problem& problem);

  // With sizes, strides and options of the operands.
  const Problem& problem() const { return problem_; }
  // Runs the forward of a backward, which needs its log-sum-exp.
  void run_forward(const Plan& forward) const;
  // Runs both plans and waits for them.
  void run(const Plan& tested, const Plan& expected);
  // What is wrong with the results of the first one, "" if nothing.
  std::string fault() const;

 private:
  struct Sequence {
    int64_t rows;
    int64_t keys;
  };
  struct Result {
    const char* name;
    Place tested;
    Place expected;
    double most;  // the largest difference
  };

  Place operand(int64_t heads, int64_t rows, int64_t dim);
  void add_result(const char* name, at::ScalarType type, int64_t size, double most);
  void add_results();
  void add_backward();
  void add_sequences();
  void add_keys();
  void add_options();
  void add_tree();
  void add_mask();
  void put_sequences(const Place& starts, bool of_keys);
  int64_t stored_rows() const;
  bool is_missing(size_t sequence, int64_t block) const;
  std::vector<bool> seen_rows() const;
  std::vector<bool> seeing_rows() const;
  void fill_rows(const Place& place, const std::vector<bool>& rows, float spread);
  BackwardCall call() const;
  void launch_into_results(const Plan& plan, Place Result::* place) const;
  double largest_of(const Place& place) const;
  std::string difference(const Result& result) const;

  Problem problem_;
  at::ScalarType type_;
  std::vector<Sequence> sequences_;
  int64_t rows_per_block_ = 0;  // paged: in memory
  Memory memory_;
  Numbers numbers_;
  Place query_, key_, value_;
  Place mask_, mask_map_, sinks_, slopes_, tree_, starts_, key_starts_, lengths_, blocks_;
  Place grad_out_, grad_lse_, forward_out_, lse_;  // of a backward
  std::vector<Result> results_;
};

}  // namespace fattn
