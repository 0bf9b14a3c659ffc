// Instruments kernels for the checks, in functions that clang marks as sanitised (the checked mode).
//
// Early, in the code as clang emits it, the pass marks the lifetime of each private array, spoils other
// variables, checks every index into an array or vector against its length, and splits off accesses of vector
// components. Late, in optimised code, every memory access uses the address that softmetal_access returns.
// Kernels compute with artificial buffer addresses (simt/checks/checker.h), so a stray access is attributed
// to its pointer's buffer at any distance.
#include <llvm/Analysis/ValueTracking.h>
#include <llvm/Demangle/Demangle.h>
#include <llvm/IR/DebugInfoMetadata.h>
#include <llvm/IR/IRBuilder.h>
#include <llvm/IR/InstIterator.h>
#include <llvm/IR/Instructions.h>
#include <llvm/IR/IntrinsicInst.h>
#include <llvm/IR/Module.h>
#include <llvm/Transforms/Utils/BasicBlockUtils.h>

#include "../abi.h"
#include "passes.h"

using namespace llvm;

namespace softmetal {
namespace {

bool is_checked(const Function& f) {
  return !f.isDeclaration() && f.hasFnAttribute(Attribute::SanitizeAddress);
}

bool holds_array(Type* type) {
  if (type->isArrayTy()) return true;
  auto* structure = dyn_cast<StructType>(type);
  return structure && any_of(structure->elements(), holds_array);
}

constexpr const char* kTracked = "softmetal.private";
bool is_tracked(const AllocaInst& alloca) { return alloca.hasMetadata(kTracked); }

// The source name of the object that a pointer points to. clang names the storage of a parameter p "p.addr",
// and adds a suffix to variables of inlined functions.
std::string name_of(const Value* pointer) {
  const Value* object = getUnderlyingObject(pointer);
  if (auto* load = dyn_cast<LoadInst>(object)) object = load->getPointerOperand();
  return demangle(object->getName().split('.').first);
}

// Calls in a function with debug information need a location.
void give_place(IRBuilder<>& b, Function& f) {
  if (DISubprogram* program = f.getSubprogram(); program && !b.getCurrentDebugLocation())
    b.SetCurrentDebugLocation(DILocation::get(f.getContext(), program->getLine(), 0, program));
}

class Early {
 public:
  explicit Early(Module& module)
      : module_(module),
        none_(Type::getVoidTy(module.getContext())),
        pointer_(PointerType::getUnqual(module.getContext())),
        size_(Type::getInt64Ty(module.getContext())),
        begin_(module.getOrInsertFunction("softmetal_private_begin", none_, pointer_, size_, pointer_)),
        end_(module.getOrInsertFunction("softmetal_private_end", none_, pointer_, size_)),
        written_(module.getOrInsertFunction("softmetal_private_written", none_, pointer_)),
        index_(module.getOrInsertFunction("softmetal_index", none_, pointer_, size_, size_, pointer_)),
        component_(module.getOrInsertFunction("softmetal_component", none_, size_, size_, pointer_)),
        alignment_(module.getOrInsertFunction("softmetal_alignment", none_, pointer_, size_)) {}

  void run(Function& f) {
    SmallVector<AllocaInst*> arrays, scalars;
    SmallVector<GetElementPtrInst*> indexing;
    SmallVector<LoadInst*> loads;
    SmallVector<CallBase*> calls;
    SmallVector<Instruction*> components;
    for (Instruction& i : instructions(f)) {
      if (auto* alloca = dyn_cast<AllocaInst>(&i))
        (holds_array(alloca->getAllocatedType()) ? arrays : scalars).push_back(alloca);
      if (auto* gep = dyn_cast<GetElementPtrInst>(&i)) indexing.push_back(gep);
      if (auto* load = dyn_cast<LoadInst>(&i); load && load->getType()->isVectorTy()) loads.push_back(load);
      if (auto* call = dyn_cast<CallBase>(&i); call && !isa<IntrinsicInst>(call)) calls.push_back(call);
      if (isa<ExtractElementInst>(i) || isa<InsertElementInst>(i)) components.push_back(&i);
    }
    for (Instruction* component : components) check_component(*component);
    for (LoadInst* load : loads) check_alignment(*load);
    for (LoadInst* load : loads) split_components(*load);
    for (AllocaInst* array : arrays) track(*array);
    for (AllocaInst* scalar : scalars) spoil(*scalar);
    for (CallBase* call : calls) note_writes_of(*call);
    for (GetElementPtrInst* gep : indexing) check_indices(*gep);
  }

 private:
  // The part of a vector that the code uses, to which the optimiser narrows the load.
  void check_alignment(LoadInst& load) {
    bool taken_apart = all_of(load.users(), [](User* user) {
      return isa<ExtractElementInst>(user) || isa<ShuffleVectorInst>(user);
    });
    if (!taken_apart || isa<AllocaInst>(getUnderlyingObject(load.getPointerOperand()))) return;
    IRBuilder<>(&load).CreateCall(
        alignment_, {load.getPointerOperand(), ConstantInt::get(size_, load.getAlign().value())});
  }

  // `v[i]` with an i that is known at run time. The code may not access memory past the end.
  void check_component(Instruction& i) {
    Value* vector = i.getOperand(0);
    auto* type = cast<FixedVectorType>(vector->getType());
    Value* index = i.getOperand(isa<InsertElementInst>(i) ? 2 : 1);
    uint64_t count = type->getNumElements();
    if (auto* constant = dyn_cast<ConstantInt>(index); constant && constant->getZExtValue() < count) return;
    auto* load = dyn_cast<LoadInst>(vector);
    report_outside(i, index, count, [&](IRBuilder<>& report, Value* number, Value* limit) {
      Value* name = report.CreateGlobalStringPtr(load ? name_of(load->getPointerOperand()) : "");
      report.CreateCall(component_, {number, limit, name});
    });
  }

  // Calls `report` if `index`, a number in the source, is not below `limit`.
  void report_outside(Instruction& at, Value* index, uint64_t limit,
                      function_ref<void(IRBuilder<>&, Value* number, Value* limit)> report) {
    IRBuilder<> b(&at);
    Value* number = b.CreateSExt(index, size_);
    Value* bound = ConstantInt::get(size_, limit);
    Value* outside = b.CreateICmpUGE(number, bound);
    Instruction* then = SplitBlockAndInsertIfThen(outside, at.getIterator(), false);
    IRBuilder<> inside(then);
    inside.SetCurrentDebugLocation(at.getDebugLoc());
    give_place(inside, *at.getFunction());
    report(inside, number, bound);
  }

  // `v.x = a` is a load, an insertion and a store of all of v; `v.x` is a load of all of v. Only one
  // component is accessed.
  void split_components(LoadInst& load) {
    auto* type = dyn_cast<FixedVectorType>(load.getType());
    if (!type || type->getScalarSizeInBits() % 8 || !load.isSimple() || !load.hasOneUse()) return;
    auto* insertion = dyn_cast<InsertElementInst>(load.user_back());
    if (insertion && insertion->getOperand(0) == &load && insertion->hasOneUse()) {
      auto* store = dyn_cast<StoreInst>(insertion->user_back());
      if (!store || store->getPointerOperand() != load.getPointerOperand()) return;
      IRBuilder<> b(store);
      b.CreateStore(insertion->getOperand(1), element(b, load, insertion->getOperand(2)));
      store->eraseFromParent();
      insertion->eraseFromParent();
      load.eraseFromParent();
      return;
    }
    auto* extraction = dyn_cast<ExtractElementInst>(load.user_back());
    if (extraction && isa<AllocaInst>(getUnderlyingObject(load.getPointerOperand()))) {
      IRBuilder<> b(&load);
      if (!isa<ConstantInt>(extraction->getIndexOperand())) return;
      Value* pointer = element(b, load, extraction->getIndexOperand());
      extraction->replaceAllUsesWith(b.CreateLoad(extraction->getType(), pointer));
      extraction->eraseFromParent();
      load.eraseFromParent();
    }
  }

  static Value* element(IRBuilder<>& b, LoadInst& load, Value* index) {
    return b.CreateGEP(load.getType()->getScalarType(), load.getPointerOperand(), index);
  }

  static SmallVector<IntrinsicInst*> markers(AllocaInst& variable, Intrinsic::ID kind) {
    SmallVector<IntrinsicInst*> found;
    for (User* user : variable.users())
      if (auto* marker = dyn_cast<IntrinsicInst>(user); marker && marker->getIntrinsicID() == kind)
        found.push_back(marker);
    return found;
  }

  // The bytes of a variable that is not an array are not tracked. It is initialised to ones, like fresh
  // buffers: NaN in every float type. Otherwise the optimiser could choose its value.
  void spoil(AllocaInst& variable) {
    auto size = variable.getAllocationSize(module_.getDataLayout());
    if (!size) return;
    auto insert = [&](Instruction* before) {
      IRBuilder<> b(before);
      b.CreateMemSet(&variable, b.getInt8(0xff), size->getFixedValue(), variable.getAlign());
    };
    const auto starts = markers(variable, Intrinsic::lifetime_start);
    for (IntrinsicInst* start : starts) insert(start->getNextNode());
    if (starts.empty()) insert(variable.getNextNode());
  }

  // A variable lives from each lifetime.start on, or with its function where clang emits none.
  void track(AllocaInst& array) {
    auto size = array.getAllocationSize(module_.getDataLayout());
    if (!size) return;
    Function& f = *array.getFunction();
    array.setMetadata(kTracked, MDNode::get(f.getContext(), {}));
    Value* bytes = ConstantInt::get(size_, size->getFixedValue());
    const auto starts = markers(array, Intrinsic::lifetime_start);
    const auto ends = markers(array, Intrinsic::lifetime_end);
    auto insert = [&](Instruction* before, FunctionCallee callee, bool with_name) {
      IRBuilder<> b(before);
      give_place(b, f);
      SmallVector<Value*> arguments = {&array, bytes};
      if (with_name) arguments.push_back(b.CreateGlobalStringPtr(name_of(&array)));
      b.CreateCall(callee, arguments);
    };
    for (IntrinsicInst* start : starts) insert(start->getNextNode(), begin_, true);
    for (IntrinsicInst* end : ends) insert(end, end_, false);
    if (!starts.empty()) return;
    insert(array.getNextNode(), begin_, true);
    for (BasicBlock& block : f)
      if (isa<ReturnInst>(block.getTerminator())) insert(block.getTerminator(), end_, false);
  }

  // Values that the library's (unchecked) code writes to a private array count as initialised.
  void note_writes_of(CallBase& call) {
    Function* callee = call.getCalledFunction();
    if (!callee || is_checked(*callee) || callee->getName().starts_with("softmetal_")) return;
    for (Value* argument : call.args())
      if (argument->getType()->isPointerTy())
        if (auto* array = dyn_cast<AllocaInst>(getUnderlyingObject(argument)); array && is_tracked(*array))
          IRBuilder<>(call.getNextNode()).CreateCall(written_, {array});
  }

  // Checks the index of each dimension against the type declared in the source. One past the end is a valid
  // address, but not an element.
  void check_indices(GetElementPtrInst& gep) {
    bool accessed = any_of(gep.users(), [&](User* user) {
      return isa<LoadInst>(user) ||
             (isa<StoreInst>(user) && cast<StoreInst>(user)->getPointerOperand() == &gep);
    });
    Type* type = gep.getSourceElementType();
    for (unsigned i = 2; i < gep.getNumOperands(); i++) {
      Value* index = gep.getOperand(i);
      auto* array = dyn_cast<ArrayType>(type);
      type = GetElementPtrInst::getTypeAtIndex(type, index);
      if (!array || !array->getNumElements()) continue;
      uint64_t limit = array->getNumElements() + (accessed || i + 1 < gep.getNumOperands() ? 0 : 1);
      auto* constant = dyn_cast<ConstantInt>(index);
      if (constant && constant->getZExtValue() < limit) continue;
      report_outside(gep, index, limit, [&](IRBuilder<>& report, Value* number, Value*) {
        Value* name = report.CreateGlobalStringPtr(name_of(gep.getPointerOperand()));
        Value* count = ConstantInt::get(size_, array->getNumElements());
        report.CreateCall(index_, {gep.getPointerOperand(), number, count, name});
      });
    }
  }

  Module& module_;
  Type *none_, *pointer_, *size_;
  FunctionCallee begin_, end_, written_, index_, component_, alignment_;
};

// Whether a vector is read only to be written back with other components, or to be taken apart.
bool is_partial(const Value* vector, unsigned depth = 0) {
  return depth < 4 && all_of(
                          vector->users(),
                          [&](const User* user) {
                            if (isa<ShuffleVectorInst>(user)) return true;
                            return isa<InsertElementInst>(user) && is_partial(user, depth + 1);
                          });
}

// Whether a pointer leads to the runtime's own description of a lane, its simdgroup or its threadgroup.
bool is_of_runtime(const Value* pointer) {
  const Value* object = getUnderlyingObject(pointer, 12);
  if (auto* load = dyn_cast<LoadInst>(object)) object = getUnderlyingObject(load->getPointerOperand(), 12);
  auto* call = dyn_cast<CallBase>(object);
  return call && call->getCalledFunction() &&
         call->getCalledFunction()->getName() == "softmetal_current_lane";
}

class Late {
 public:
  explicit Late(Module& module)
      : layout_(module.getDataLayout()),
        pointer_(PointerType::getUnqual(module.getContext())),
        size_(Type::getInt64Ty(module.getContext())),
        number_(Type::getInt32Ty(module.getContext())),
        access_(module.getOrInsertFunction("softmetal_access", pointer_, pointer_, size_, number_)),
        object_(module.getOrInsertFunction("softmetal_object_access", Type::getVoidTy(module.getContext()),
                                           pointer_, size_, number_, pointer_, size_, pointer_)) {}

  void run(Function& f) {
    SmallVector<Instruction*> accesses;
    for (Instruction& i : instructions(f))
      if (i.mayReadOrWriteMemory()) accesses.push_back(&i);
    for (Instruction* i : accesses) instrument(*i);
  }

 private:
  void instrument(Instruction& i) {
    if (auto* load = dyn_cast<LoadInst>(&i)) {
      uint32_t flags = (load->isAtomic() ? SOFTMETAL_ACCESS_ATOMIC : 0);
      if (load->getType()->isVectorTy() && is_partial(load)) flags |= SOFTMETAL_ACCESS_COPY;
      operand(i, load->getPointerOperandIndex(), bytes(load->getType()), flags, load->getAlign());
    } else if (auto* store = dyn_cast<StoreInst>(&i)) {
      uint32_t flags = SOFTMETAL_ACCESS_WRITE | (store->isAtomic() ? SOFTMETAL_ACCESS_ATOMIC : 0);
      operand(i, store->getPointerOperandIndex(), bytes(store->getValueOperand()->getType()), flags,
              store->getAlign());
    } else if (auto* update = dyn_cast<AtomicRMWInst>(&i)) {
      operand(i, update->getPointerOperandIndex(), bytes(update->getValOperand()->getType()), kUpdate,
              update->getAlign());
    } else if (auto* exchange = dyn_cast<AtomicCmpXchgInst>(&i)) {
      operand(i, exchange->getPointerOperandIndex(), bytes(exchange->getNewValOperand()->getType()), kUpdate,
              exchange->getAlign());
    } else if (auto* memory = dyn_cast<MemIntrinsic>(&i)) {
      if (isa<MemTransferInst>(memory)) operand(i, 1, memory->getLength(), SOFTMETAL_ACCESS_COPY, Align(1));
      operand(i, 0, memory->getLength(), SOFTMETAL_ACCESS_WRITE, Align(1));
    }
  }

  Value* bytes(Type* type) { return ConstantInt::get(size_, layout_.getTypeStoreSize(type)); }

  // Scalars on the stack are not checked.
  void operand(Instruction& i, unsigned number, Value* size, uint32_t flags, Align alignment) {
    Value* pointer = i.getOperand(number);
    Value* object = getUnderlyingObject(pointer, 12);
    auto* alloca = dyn_cast<AllocaInst>(object);
    if ((alloca && !is_tracked(*alloca)) || is_of_runtime(pointer)) return;
    IRBuilder<> b(&i);
    give_place(b, *i.getFunction());
    Value* kind = ConstantInt::get(number_, flags | static_cast<uint32_t>(Log2(alignment)) << 8);
    auto* global = dyn_cast<GlobalVariable>(object);
    if (alloca || global) {
      TypeSize whole =
          alloca ? *alloca->getAllocationSize(layout_) : layout_.getTypeAllocSize(global->getValueType());
      Value* name = b.CreateGlobalStringPtr(name_of(object));
      b.CreateCall(object_, {pointer, size, kind, object, ConstantInt::get(size_, whole), name});
    } else {
      i.setOperand(number, b.CreateCall(access_, {pointer, size, kind}));
    }
  }

  static constexpr uint32_t kUpdate =
      SOFTMETAL_ACCESS_WRITE | SOFTMETAL_ACCESS_ATOMIC | SOFTMETAL_ACCESS_UPDATE;

  const DataLayout& layout_;
  Type *pointer_, *size_, *number_;
  FunctionCallee access_, object_;
};

template <class Pass>
PreservedAnalyses over(Module& module) {
  Pass pass(module);
  SmallVector<Function*> functions;
  for (Function& f : module)
    if (is_checked(f)) functions.push_back(&f);
  for (Function* f : functions) pass.run(*f);
  return PreservedAnalyses::none();
}

}  // namespace

PreservedAnalyses EarlyChecksPass::run(Module& module, ModuleAnalysisManager&) { return over<Early>(module); }
PreservedAnalyses LateChecksPass::run(Module& module, ModuleAnalysisManager&) { return over<Late>(module); }

}  // namespace softmetal
