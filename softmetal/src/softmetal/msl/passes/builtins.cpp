// Built-in variables at program scope: `uint place [[thread_position_in_grid]];`. Each is external and has no
// definition (msl/stages.py). A function that uses one gets a local variable with the calling thread's value.
#include "builtins.h"

#include <llvm/IR/Constants.h>
#include <llvm/IR/DebugInfoMetadata.h>
#include <llvm/IR/IRBuilder.h>
#include <llvm/IR/Module.h>
#include <llvm/IR/ReplaceConstant.h>

using namespace llvm;

namespace softmetal {
namespace {

// Clang prefixes an assembler name with a byte that turns mangling off.
StringRef assembler_name(const GlobalValue& value) {
  StringRef name = value.getName();
  name.consume_front("\1");
  return name;
}

Function* value_of(Module& module, const GlobalVariable& variable) {
  const std::string wanted = assembler_name(variable).str() + "_value";
  for (Function& function : module)
    if (assembler_name(function) == wanted) return &function;
  return nullptr;
}

void make_local(GlobalVariable& variable, Function& value) {
  convertUsersOfConstantsToInstructions(&variable);
  DenseMap<Function*, Value*> locals;
  for (Use& use : make_early_inc_range(variable.uses())) {
    auto* user = dyn_cast<Instruction>(use.getUser());
    if (!user) continue;
    Value*& local = locals[user->getFunction()];
    if (!local) {
      BasicBlock& entry = user->getFunction()->getEntryBlock();
      IRBuilder<> builder(&entry, entry.getFirstInsertionPt());
      if (auto* subprogram = user->getFunction()->getSubprogram())
        builder.SetCurrentDebugLocation(
            DILocation::get(variable.getContext(), subprogram->getLine(), 0, subprogram));
      AllocaInst* place = builder.CreateAlloca(variable.getValueType());
      place->setAlignment(variable.getAlign().valueOrOne());
      builder.CreateStore(builder.CreateCall(&value), place);
      local = place;
    }
    use.set(local);
  }
}

}  // namespace

PreservedAnalyses BuiltinsPass::run(Module& module, ModuleAnalysisManager&) {
  bool changed = false;
  for (GlobalVariable& variable : module.globals()) {
    if (!variable.isDeclaration() || !assembler_name(variable).starts_with("softmetal_builtin_")) continue;
    if (Function* value = value_of(module, variable)) {
      make_local(variable, *value);
      changed = true;
    }
  }
  return changed ? PreservedAnalyses::none() : PreservedAnalyses::all();
}

}  // namespace softmetal
