#pragma once
#include <llvm/IR/PassManager.h>

namespace softmetal {

struct RecursionPass : llvm::PassInfoMixin<RecursionPass> {
  llvm::PreservedAnalyses run(llvm::Module&, llvm::ModuleAnalysisManager&);
  static bool isRequired() { return true; }
};

}  // namespace softmetal
