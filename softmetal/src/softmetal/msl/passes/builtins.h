#pragma once
#include <llvm/IR/PassManager.h>

namespace softmetal {

struct BuiltinsPass : llvm::PassInfoMixin<BuiltinsPass> {
  llvm::PreservedAnalyses run(llvm::Module&, llvm::ModuleAnalysisManager&);
  static bool isRequired() { return true; }
};

}  // namespace softmetal
