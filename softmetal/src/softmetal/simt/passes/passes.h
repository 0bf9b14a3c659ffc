// The compiler's part of the runtime: passes over the LLVM code of a kernel module, loaded into clang by
// softmetal/msl/compile.py.
#pragma once

#include <llvm/IR/PassManager.h>

namespace softmetal {

// Tells the runtime where in the program every convergent operation is: see convergence.cpp.
struct ConvergencePass : llvm::PassInfoMixin<ConvergencePass> {
  llvm::PreservedAnalyses run(llvm::Module&, llvm::ModuleAnalysisManager&);
  static bool isRequired() { return true; }
};

// Lets vectors lie anywhere in memory: see alignment.cpp.
struct AlignmentPass : llvm::PassInfoMixin<AlignmentPass> {
  llvm::PreservedAnalyses run(llvm::Module&, llvm::ModuleAnalysisManager&);
  static bool isRequired() { return true; }
};

// What the checks see of a kernel: see checks.cpp.
struct EarlyChecksPass : llvm::PassInfoMixin<EarlyChecksPass> {
  llvm::PreservedAnalyses run(llvm::Module&, llvm::ModuleAnalysisManager&);
  static bool isRequired() { return true; }
};
struct LateChecksPass : llvm::PassInfoMixin<LateChecksPass> {
  llvm::PreservedAnalyses run(llvm::Module&, llvm::ModuleAnalysisManager&);
  static bool isRequired() { return true; }
};

}  // namespace softmetal
