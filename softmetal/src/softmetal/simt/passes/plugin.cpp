// When the passes run.
#include <llvm/Passes/PassBuilder.h>
#include <llvm/Passes/PassPlugin.h>

#include "passes.h"

extern "C" __attribute__((visibility("default"))) llvm::PassPluginLibraryInfo llvmGetPassPluginInfo() {
  return {
      LLVM_PLUGIN_API_VERSION, "softmetal", "1", [](llvm::PassBuilder& builder) {
        // Before anything is inlined, merged or unrolled: the code still has the shape of the source.
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
