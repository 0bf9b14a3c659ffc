// Metal has no recursion: a function in a cycle of calls is an error. The pass runs before the optimiser,
// when every call names its target, and overloads and instantiations are separate functions.
#include "recursion.h"

#include <llvm/ADT/SCCIterator.h>
#include <llvm/Analysis/CallGraph.h>
#include <llvm/IR/DebugInfoMetadata.h>
#include <llvm/IR/LLVMContext.h>

using namespace llvm;

namespace softmetal {
namespace {

// "file:line: " first, for msl/diagnostics.py.
void refuse(const Function& function) {
  const DISubprogram* source = function.getSubprogram();
  if (!source) return;
  const StringRef name = source->getName().take_until([](char c) { return c == '<'; });
  function.getContext().emitError(source->getFilename() + ":" + Twine(source->getLine()) + ": '" + name +
                                  "' calls itself: Metal has no recursion");
}

}  // namespace

PreservedAnalyses RecursionPass::run(Module& module, ModuleAnalysisManager&) {
  CallGraph calls(module);
  for (auto circle = scc_begin(&calls); !circle.isAtEnd(); ++circle) {
    if (!circle.hasCycle()) continue;
    for (const CallGraphNode* node : *circle)
      if (const Function* function = node->getFunction()) refuse(*function);
  }
  return PreservedAnalyses::all();
}

}  // namespace softmetal
