// Vectors may be at any address: the GPU's loads and stores do not trap where the host's would. (In checked
// modules a misaligned access is a finding: see softmetal/msl/compile.py.)
#include <llvm/Analysis/ValueTracking.h>
#include <llvm/IR/InstIterator.h>
#include <llvm/IR/Instructions.h>
#include <llvm/IR/IntrinsicInst.h>
#include <llvm/IR/Module.h>

#include "passes.h"

using namespace llvm;

namespace softmetal {
namespace {

// The compiler places this object, so its alignment holds. A pointer into a buffer may have any.
bool is_placed_here(const Value* pointer) {
  const Value* object = getUnderlyingObject(pointer);
  return isa<AllocaInst, GlobalVariable>(object);
}

void expect_any_alignment(Instruction& instruction) {
  if (auto* load = dyn_cast<LoadInst>(&instruction); load && !load->isAtomic()) {
    if (!is_placed_here(load->getPointerOperand())) load->setAlignment(Align(1));
  } else if (auto* store = dyn_cast<StoreInst>(&instruction); store && !store->isAtomic()) {
    if (!is_placed_here(store->getPointerOperand())) store->setAlignment(Align(1));
  } else if (auto* memory = dyn_cast<AnyMemIntrinsic>(&instruction)) {
    if (!is_placed_here(memory->getDest())) memory->setDestAlignment(Align(1));
    if (auto* copy = dyn_cast<AnyMemTransferInst>(memory); copy && !is_placed_here(copy->getSource()))
      copy->setSourceAlignment(Align(1));
  }
}

// References promise the alignment of their type.
void forget_alignment_of_arguments(Function& f) {
  for (Argument& argument : f.args())
    if (!argument.hasByValAttr() && !argument.hasStructRetAttr())
      f.removeParamAttr(argument.getArgNo(), Attribute::Alignment);
  f.removeRetAttr(Attribute::Alignment);
}

void forget_alignment_of_arguments(CallBase& call) {
  if (isa<IntrinsicInst>(call)) return;
  for (unsigned i = 0; i < call.arg_size(); i++)
    if (!call.isByValArgument(i) && !call.paramHasAttr(i, Attribute::StructRet))
      call.removeParamAttr(i, Attribute::Alignment);
  call.removeRetAttr(Attribute::Alignment);
}

}  // namespace

PreservedAnalyses AlignmentPass::run(Module& module, ModuleAnalysisManager&) {
  for (Function& f : module) {
    if (f.hasFnAttribute(Attribute::SanitizeAddress)) continue;
    forget_alignment_of_arguments(f);
    for (Instruction& instruction : instructions(f)) {
      if (auto* call = dyn_cast<CallBase>(&instruction)) forget_alignment_of_arguments(*call);
      expect_any_alignment(instruction);
    }
  }
  return PreservedAnalyses::none();
}

}  // namespace softmetal
