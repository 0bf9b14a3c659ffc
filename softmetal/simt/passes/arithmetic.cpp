// What the GPU defines, or leaves undefined without a trap, and the host's instructions do not: integer
// division by zero gives 0, and vectors may lie anywhere in memory. (In checked modules both are findings as
// well: see softmetal/msl/compile.py.)
#include <llvm/Analysis/ValueTracking.h>
#include <llvm/IR/IRBuilder.h>
#include <llvm/IR/InstIterator.h>
#include <llvm/IR/Instructions.h>
#include <llvm/IR/IntrinsicInst.h>
#include <llvm/IR/Module.h>

#include "passes.h"

using namespace llvm;

namespace softmetal {
namespace {

// x / 0 and x % 0 are 0; the quotient of the least number and -1 is the least number.
void make_total(BinaryOperator& division) {
  Value *left = division.getOperand(0), *right = division.getOperand(1);
  if (auto* constant = dyn_cast<ConstantInt>(right);
      constant && !constant->isZero() && !constant->isMinusOne())
    return;
  IRBuilder<> b(&division);
  Type* type = division.getType();
  Value* zero = b.CreateICmpEQ(right, Constant::getNullValue(type));
  Value* traps = zero;
  if (division.getOpcode() == Instruction::SDiv || division.getOpcode() == Instruction::SRem) {
    Value* least = ConstantInt::get(type, APInt::getSignedMinValue(type->getScalarSizeInBits()));
    Value* minus_one = b.CreateICmpEQ(right, Constant::getAllOnesValue(type));
    traps = b.CreateOr(zero, b.CreateAnd(minus_one, b.CreateICmpEQ(left, least)));
  }
  division.setOperand(1, b.CreateSelect(traps, ConstantInt::get(type, 1), right));
  b.SetInsertPoint(division.getNextNode());
  auto* total = cast<SelectInst>(b.CreateSelect(zero, Constant::getNullValue(type), &division));
  division.replaceUsesWithIf(total, [&](Use& use) { return use.getUser() != total; });
}

// Alignment is known of what the compiler places; a pointer into a buffer may be anything.
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

PreservedAnalyses ArithmeticPass::run(Module& module, ModuleAnalysisManager&) {
  for (Function& f : module) {
    SmallVector<BinaryOperator*> divisions;
    for (Instruction& instruction : instructions(f))
      if (instruction.isIntDivRem()) divisions.push_back(cast<BinaryOperator>(&instruction));
    for (BinaryOperator* division : divisions) make_total(*division);
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
