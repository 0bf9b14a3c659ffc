// The compiler's part of the runtime: passes over the LLVM code of a kernel module, loaded into clang by
// softmetal/msl/compile.py.
#pragma once

#include <llvm/IR/PassManager.h>

namespace softmetal {

// Reports the position of every convergent operation to the runtime: see convergence.cpp.
struct ConvergencePass : llvm::PassInfoMixin<ConvergencePass> {
  llvm::PreservedAnalyses run(llvm::Module&, llvm::ModuleAnalysisManager&);
  static bool isRequired() { return true; }
};

// Permits vectors at any address: see alignment.cpp.
struct AlignmentPass : llvm::PassInfoMixin<AlignmentPass> {
  llvm::PreservedAnalyses run(llvm::Module&, llvm::ModuleAnalysisManager&);
  static bool isRequired() { return true; }
};

// Instruments kernels for the checks: see checks.cpp.
struct EarlyChecksPass : llvm::PassInfoMixin<EarlyChecksPass> {
  llvm::PreservedAnalyses run(llvm::Module&, llvm::ModuleAnalysisManager&);
  static bool isRequired() { return true; }
};
struct LateChecksPass : llvm::PassInfoMixin<LateChecksPass> {
  llvm::PreservedAnalyses run(llvm::Module&, llvm::ModuleAnalysisManager&);
  static bool isRequired() { return true; }
};

}  // namespace softmetal
