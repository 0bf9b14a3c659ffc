// Two passes that give kernels the arithmetic of Apple's GPUs. The first runs before the optimiser and
// defines integer operations that C++ leaves undefined. The second runs after it: it contracts products and
// sums that clang marked with `contract` and, if asked, flushes subnormal floats around every operation. The
// plugin holds a third pass, recursion.cpp.
//
// clang contracts only if the processor has the instruction, and x86 before AVX512-FP16 has none for half.
// Here the same products are contracted in float and in half on every machine.
#include <llvm/IR/IRBuilder.h>
#include <llvm/IR/InstIterator.h>
#include <llvm/IR/PatternMatch.h>
#include <llvm/Passes/PassBuilder.h>
#include <llvm/Passes/PassPlugin.h>
#include <llvm/Support/CommandLine.h>

#include "builtins.h"
#include "recursion.h"

using namespace llvm;

namespace {
cl::opt<bool> flush_subnormals("softmetal-flush-subnormals",
                               cl::desc("Read and write subnormal floats as zero"));

// The a * b in a * b + c. It is contracted even if it has other uses, as in LLVM for GPUs, where a fused
// multiply-add costs as much as a sum.
struct Product {
  BinaryOperator* product = nullptr;
  UnaryOperator* negation = nullptr;  // the product's, or null
};

Product contractable(Value* value) {
  Product found;
  if (auto* negation = dyn_cast<UnaryOperator>(value);
      negation && negation->getOpcode() == Instruction::FNeg) {
    found.negation = negation;
    value = negation->getOperand(0);
  }
  auto* product = dyn_cast<BinaryOperator>(value);
  if (product && product->getOpcode() == Instruction::FMul && product->hasAllowContract())
    found.product = product;
  return found;
}

// A fused multiply-add with one rounding. The exact product of two halves fits a double, and so does its sum
// with a half unless that half alone determines the result.
Value* fused(IRBuilder<>& builder, Value* a, Value* b, Value* c) {
  Type* type = c->getType();
  if (!type->getScalarType()->isHalfTy()) return builder.CreateIntrinsic(Intrinsic::fma, {type}, {a, b, c});
  Type* wide = type->getWithNewType(builder.getDoubleTy());
  Value* product = builder.CreateFMul(builder.CreateFPExt(a, wide), builder.CreateFPExt(b, wide));
  return builder.CreateFPTrunc(builder.CreateFAdd(product, builder.CreateFPExt(c, wide)), type);
}

// Not for bfloat: GPUs before family 9 emulate it and round after every operation.
bool is_sum(const BinaryOperator& operation) {
  const Type* scalar = operation.getType()->getScalarType();
  return (operation.getOpcode() == Instruction::FAdd || operation.getOpcode() == Instruction::FSub) &&
         operation.hasAllowContract() && (scalar->isFloatTy() || scalar->isHalfTy());
}

bool contract(BinaryOperator* sum) {
  const bool is_difference = sum->getOpcode() == Instruction::FSub;
  for (unsigned side = 0; side < 2; ++side) {
    const auto [product, negation] = contractable(sum->getOperand(side));
    if (!product) continue;
    IRBuilder<> builder(sum);
    Value* a = product->getOperand(0);
    Value* c = sum->getOperand(1 - side);
    if ((negation != nullptr) != (is_difference && side == 1)) a = builder.CreateFNeg(a);
    if (is_difference && side == 0) c = builder.CreateFNeg(c);
    sum->replaceAllUsesWith(fused(builder, a, product->getOperand(1), c));
    sum->eraseFromParent();
    if (negation && negation->use_empty()) negation->eraseFromParent();
    if (product->use_empty()) product->eraseFromParent();
    return true;
  }
  return false;
}

Value* flushed(IRBuilder<>& builder, Value* x) {
  Value* smallest = ConstantFP::get(x->getType(), 0x1p-126);
  Value* magnitude = builder.CreateUnaryIntrinsic(Intrinsic::fabs, x);
  Value* zero = builder.CreateBinaryIntrinsic(Intrinsic::copysign, ConstantFP::get(x->getType(), 0.0), x);
  return builder.CreateSelect(builder.CreateFCmpOLT(magnitude, smallest), zero, x);
}

bool is_float_arithmetic(const Instruction& instruction) {
  if (!instruction.getType()->getScalarType()->isFloatTy()) return false;
  if (const auto* call = dyn_cast<IntrinsicInst>(&instruction))
    return call->getIntrinsicID() == Intrinsic::fma || call->getIntrinsicID() == Intrinsic::sqrt;
  return isa<BinaryOperator>(instruction);
}

void flush(Instruction* operation) {
  IRBuilder<> builder(operation);
  for (Use& operand : operation->operands())
    if (operand->getType()->getScalarType()->isFloatTy()) operand.set(flushed(builder, operand));
  builder.SetInsertPoint(operation->getNextNode());
  SmallVector<Use*> uses;
  for (Use& use : operation->uses()) uses.push_back(&use);
  Value* result = flushed(builder, operation);
  for (Use* use : uses) use->set(result);
}

// The library's products of 8x8 matrices have their own arithmetic.
bool is_library(const Function& function) { return function.getName().starts_with("_ZN9softmetal"); }

// Metal uses only the low bits of a shift amount.
void mask_shift(BinaryOperator* shift) {
  Type* type = shift->getType();
  IRBuilder<> builder(shift);
  Value* mask = ConstantInt::get(type, type->getScalarSizeInBits() - 1);
  shift->setOperand(1, builder.CreateAnd(shift->getOperand(1), mask));
  shift->dropPoisonGeneratingFlags();
}

// A division by zero, or of the least integer by -1, has an unspecified value but no other effect. Here x / 0
// has all bits set and x % 0 is x.
void define_division(BinaryOperator* division) {
  Type* type = division->getType();
  Value *x = division->getOperand(0), *y = division->getOperand(1);
  const bool is_signed =
      division->getOpcode() == Instruction::SDiv || division->getOpcode() == Instruction::SRem;
  const bool is_quotient =
      division->getOpcode() == Instruction::SDiv || division->getOpcode() == Instruction::UDiv;
  IRBuilder<> builder(division);
  Value* is_zero = builder.CreateICmpEQ(y, ConstantInt::get(type, 0));
  Value* is_undefined = is_zero;
  if (is_signed) {
    Value* least = ConstantInt::get(type, APInt::getSignedMinValue(type->getScalarSizeInBits()));
    Value* overflows = builder.CreateAnd(builder.CreateICmpEQ(x, least),
                                         builder.CreateICmpEQ(y, ConstantInt::getAllOnesValue(type)));
    is_undefined = builder.CreateOr(is_zero, overflows);
  }
  division->setOperand(1, builder.CreateSelect(is_undefined, ConstantInt::get(type, 1), y));
  division->dropPoisonGeneratingFlags();
  builder.SetInsertPoint(division->getNextNode());
  SmallVector<Use*> uses;
  for (Use& use : division->uses()) uses.push_back(&use);
  Value* of_zero = is_quotient ? ConstantInt::getAllOnesValue(type) : x;
  Value* result = builder.CreateSelect(is_zero, of_zero, division);
  for (Use* use : uses) use->set(result);
}

struct IntegerPass : PassInfoMixin<IntegerPass> {
  PreservedAnalyses run(Function& function, FunctionAnalysisManager&) {
    SmallVector<BinaryOperator*> operations;
    for (Instruction& instruction : instructions(function)) {
      auto* operation = dyn_cast<BinaryOperator>(&instruction);
      if (operation && (operation->isShift() || operation->isIntDivRem())) operations.push_back(operation);
    }
    for (BinaryOperator* operation : operations) {
      if (operation->isShift())
        mask_shift(operation);
      else
        define_division(operation);
    }
    return operations.empty() ? PreservedAnalyses::all() : PreservedAnalyses::none();
  }
  static bool isRequired() { return true; }
};

struct ArithmeticPass : PassInfoMixin<ArithmeticPass> {
  PreservedAnalyses run(Function& function, FunctionAnalysisManager&) {
    SmallVector<BinaryOperator*> sums;
    for (Instruction& instruction : instructions(function))
      if (auto* sum = dyn_cast<BinaryOperator>(&instruction); sum && is_sum(*sum)) sums.push_back(sum);
    bool changed = false;
    for (BinaryOperator* sum : sums) changed |= contract(sum);
    if (flush_subnormals && !is_library(function)) {
      SmallVector<Instruction*> operations;
      for (Instruction& instruction : instructions(function))
        if (is_float_arithmetic(instruction)) operations.push_back(&instruction);
      for (Instruction* operation : operations) flush(operation);
      changed |= !operations.empty();
    }
    return changed ? PreservedAnalyses::none() : PreservedAnalyses::all();
  }
  static bool isRequired() { return true; }
};
}  // namespace

extern "C" __attribute__((visibility("default"))) PassPluginLibraryInfo llvmGetPassPluginInfo() {
  return {LLVM_PLUGIN_API_VERSION, "softmetal-arithmetic", "1", [](PassBuilder& builder) {
            builder.registerPipelineStartEPCallback([](ModulePassManager& passes, OptimizationLevel) {
              passes.addPass(softmetal::BuiltinsPass());
              passes.addPass(softmetal::RecursionPass());
              passes.addPass(createModuleToFunctionPassAdaptor(IntegerPass()));
            });
            builder.registerOptimizerLastEPCallback([](ModulePassManager& passes, OptimizationLevel) {
              passes.addPass(createModuleToFunctionPassAdaptor(ArithmeticPass()));
            });
          }};
}
