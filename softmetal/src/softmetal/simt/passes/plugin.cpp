// Registers the passes.
#include <llvm/Passes/PassBuilder.h>
#include <llvm/Passes/PassPlugin.h>

#include "passes.h"

extern "C" __attribute__((visibility("default"))) llvm::PassPluginLibraryInfo llvmGetPassPluginInfo() {
  return {
      LLVM_PLUGIN_API_VERSION, "softmetal", LLVM_VERSION_STRING, [](llvm::PassBuilder& builder) {
        // Before inlining, merging and unrolling: the code still has the structure of the source.
        builder.registerPipelineStartEPCallback([](llvm::ModulePassManager& passes, llvm::OptimizationLevel) {
          passes.addPass(softmetal::AlignmentPass());
          passes.addPass(softmetal::ConvergencePass());
          passes.addPass(softmetal::EarlyChecksPass());
        });
        builder.registerOptimizerLastEPCallback([](llvm::ModulePassManager& passes, llvm::OptimizationLevel) {
          passes.addPass(softmetal::LateChecksPass());
        });
      }};
}
