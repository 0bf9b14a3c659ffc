// Determines the lanes that take part in a simdgroup operation: the lanes that reach the same dynamic
// instance of it, by the same chain of calls, in the same iteration of every loop around each call (maximal
// reconvergence).
//
// Before every call that can reach an operation, the pass stores the lane's position: the call site and the
// iterations of the enclosing loops in a softmetal_call on the lane's stack, and a hash of the whole path in
// the lane (simt/abi.h). The runtime compares hashes to find lanes in the same operation, and paths to find
// the lane that comes first in the program. The path is data, so later optimisations do not affect it.
#include <llvm/ADT/DenseMap.h>
#include <llvm/ADT/MapVector.h>
#include <llvm/ADT/SetVector.h>
#include <llvm/ADT/StringSet.h>
#include <llvm/Analysis/LoopInfo.h>
#include <llvm/IR/DebugInfoMetadata.h>
#include <llvm/IR/Dominators.h>
#include <llvm/IR/IRBuilder.h>
#include <llvm/IR/Instructions.h>
#include <llvm/IR/Module.h>
#include <llvm/Support/MathExtras.h>

#include <algorithm>

#include "../abi.h"
#include "passes.h"

using namespace llvm;

namespace softmetal {
namespace {

constexpr const char* kOperations[] = {"softmetal_rendezvous", "softmetal_rendezvous_all",
                                       "softmetal_rendezvous_threadgroup", "softmetal_threadgroup_barrier",
                                       "softmetal_simdgroup_barrier"};

// Well-mixed odd numbers that are the same in every compilation (splitmix64).
uint64_t scrambled(uint64_t n) {
  n += 0x9E3779B97F4A7C15ull;
  n = (n ^ n >> 30) * 0xBF58476D1CE4E5B9ull;
  n = (n ^ n >> 27) * 0x94D049BB133111EBull;
  return (n ^ n >> 31) | 1;
}

SmallVector<CallBase*> calls_of(Function& f) {
  SmallVector<CallBase*> calls;
  for (User* user : f.users())
    if (auto* call = dyn_cast<CallBase>(user); call && call->getCalledFunction() == &f) calls.push_back(call);
  return calls;
}

// The functions that can reach an operation, each with its calls that lead there.
using Sites = MapVector<Function*, SetVector<CallBase*>>;

Sites convergent_calls(Module& module) {
  Sites sites;
  SmallVector<Function*> waiting;
  for (const char* name : kOperations)
    if (Function* f = module.getFunction(name)) waiting.push_back(f);
  SmallPtrSet<Function*, 16> seen(waiting.begin(), waiting.end());
  while (!waiting.empty())
    for (CallBase* call : calls_of(*waiting.pop_back_val())) {
      sites[call->getFunction()].insert(call);
      if (seen.insert(call->getFunction()).second) waiting.push_back(call->getFunction());
    }
  return sites;
}

// Basic blocks in clang's order, which is the order of the source, and their statements.
class Layout {
 public:
  explicit Layout(Function& f) {
    for (BasicBlock& block : f)
      position_[&block] = static_cast<uint32_t>(blocks_.size()), blocks_.push_back(&block);
  }
  uint32_t of(const BasicBlock* block) const { return position_.lookup(block); }

  // The block after a loop, the target of its `break`: the first block that has clang's name for it, is
  // reachable from the loop and does not belong to an inner loop. Null for a loop that ends only with
  // `return`.
  BasicBlock* end_of(const Loop& loop, const DominatorTree& tree) {
    const BasicBlock* header = loop.getHeader();
    for (size_t i = of(header) + 1; i < blocks_.size(); i++) {
      BasicBlock* block = blocks_[i];
      StringRef name = block->getName().rtrim("0123456789");
      if (name != "for.end" && name != "while.end" && name != "do.end") continue;
      bool left_from_here =
          any_of(predecessors(block), [&](BasicBlock* p) { return tree.dominates(header, p); });
      if (left_from_here && !loop.contains(block) && ends_.insert(block).second) return block;
    }
    return nullptr;
  }

 private:
  std::vector<BasicBlock*> blocks_;
  DenseMap<const BasicBlock*, uint32_t> position_;
  SmallPtrSet<const BasicBlock*, 8> ends_;
};

// A loop as in the source: it includes statements that only a last iteration executes, for example before a
// `break`.
struct SourceLoop {
  BasicBlock* header;
  uint32_t begin, end;  // in the layout
  Loop* loop;
  PHINode* iteration = nullptr;

  bool contains(BasicBlock* block, const Layout& layout, const DominatorTree& tree) const {
    if (loop->contains(block)) return true;
    uint32_t at = layout.of(block);
    return at >= begin && at < end && tree.dominates(header, block);
  }
};

class Instrumenter {
 public:
  Instrumenter(Module& module, uint64_t& serial)
      : module_(module),
        serial_(serial),
        word_(Type::getInt64Ty(module.getContext())),
        number_(Type::getInt32Ty(module.getContext())),
        pointer_(PointerType::getUnqual(module.getContext())),
        lane_(module.getOrInsertFunction("softmetal_current_lane", pointer_)) {}

  void run(Function& f, const SetVector<CallBase*>& calls, LoopInfo& loops, const DominatorTree& tree) {
    Layout layout(f);
    std::vector<SourceLoop> around = source_loops(layout, loops, tree);
    std::vector<std::pair<CallBase*, std::vector<SourceLoop*>>> sites;
    size_t depth = 0;
    for (CallBase* call : calls) {
      std::vector<SourceLoop*> mine;
      for (SourceLoop& loop : around)
        if (loop.contains(call->getParent(), layout, tree)) mine.push_back(&loop);
      depth = std::max(depth, mine.size());
      sites.push_back({call, std::move(mine)});
    }
    // A single call outside loops needs no entry: the caller's path is sufficient.
    if (sites.size() == 1 && !depth) return;
    order(sites, layout);
    enter(f, depth);
    uint32_t position = 0;
    for (auto& [call, mine] : sites) mark(*call, mine, position++, around);
  }

 private:
  static std::vector<SourceLoop> source_loops(Layout& layout, LoopInfo& loops, const DominatorTree& tree) {
    std::vector<SourceLoop> found;
    SmallVector<Loop*> inner_first = loops.getLoopsInPreorder();
    std::sort(inner_first.begin(), inner_first.end(),
              [&](Loop* a, Loop* b) { return layout.of(a->getHeader()) > layout.of(b->getHeader()); });
    for (Loop* loop : inner_first) {
      BasicBlock* end = layout.end_of(*loop, tree);
      found.push_back({loop->getHeader(), layout.of(loop->getHeader()), end ? layout.of(end) : ~0u, loop});
    }
    std::reverse(found.begin(), found.end());
    return found;
  }

  template <class T>
  static void order(T& sites, const Layout& layout) {
    std::sort(sites.begin(), sites.end(), [&](const auto& a, const auto& b) {
      CallBase *x = a.first, *y = b.first;
      if (x->getParent() == y->getParent()) return x->comesBefore(y);
      return layout.of(x->getParent()) < layout.of(y->getParent());
    });
  }

  // At the start of the function: the caller's path.
  void enter(Function& f, size_t depth) {
    IRBuilder<> b(&*f.getEntryBlock().getFirstInsertionPt());
    if (DISubprogram* program = f.getSubprogram())
      b.SetCurrentDebugLocation(DILocation::get(f.getContext(), program->getLine(), 0, program));
    Type* type = ArrayType::get(word_, sizeof(softmetal_call) / 8 + (depth + 1) / 2);
    call_ = b.CreateAlloca(type, nullptr, "softmetal.call");
    me_ = b.CreateCall(lane_);
    Value* path = b.CreateLoad(word_, field(b, me_, offsetof(softmetal_lane, path)));
    path_ = b.CreateMul(path, ConstantInt::get(word_, scrambled(~0ull)));
    Value* caller = b.CreateLoad(pointer_, field(b, me_, offsetof(softmetal_lane, call)));
    b.CreateStore(caller, field(b, call_, offsetof(softmetal_call, caller)));
  }

  // Before the call: this site, in these iterations.
  void mark(CallBase& call, const std::vector<SourceLoop*>& loops, uint32_t position,
            const std::vector<SourceLoop>& all) {
    std::vector<uint32_t> table = {position, static_cast<uint32_t>(loops.size())};
    IRBuilder<> b(&call);
    Value* path = b.CreateAdd(path_, ConstantInt::get(word_, scrambled(serial_++)));
    for (size_t i = 0; i < loops.size(); i++) {
      table.push_back(static_cast<uint32_t>(loops[i] - all.data()));
      Value* iteration = count(*loops[i]);
      b.CreateStore(iteration, field(b, call_, sizeof(softmetal_call) + i * sizeof(uint32_t)));
      Value* weighted =
          b.CreateMul(b.CreateZExt(iteration, word_), ConstantInt::get(word_, scrambled(~(i + 1))));
      path = b.CreateAdd(path, weighted);
    }
    Constant* numbers = ConstantDataArray::get(module_.getContext(), table);
    auto* site = new GlobalVariable(module_, numbers->getType(), true, GlobalValue::PrivateLinkage, numbers);
    b.CreateStore(site, field(b, call_, offsetof(softmetal_call, site)));
    b.CreateStore(path, field(b, me_, offsetof(softmetal_lane, path)));
    b.CreateStore(call_, field(b, me_, offsetof(softmetal_lane, call)));
  }

  Value* count(SourceLoop& loop) {
    if (loop.iteration) return loop.iteration;
    IRBuilder<> b(loop.header, loop.header->begin());
    loop.iteration = b.CreatePHI(number_, 2, "softmetal.iteration");
    b.SetInsertPoint(loop.header, loop.header->getFirstInsertionPt());
    Value* next = b.CreateAdd(loop.iteration, ConstantInt::get(number_, 1));
    for (BasicBlock* from : predecessors(loop.header))
      loop.iteration->addIncoming(loop.loop->contains(from) ? next : ConstantInt::get(number_, 0), from);
    return loop.iteration;
  }

  Value* field(IRBuilder<>& b, Value* base, size_t offset) {
    return b.CreateConstInBoundsGEP1_64(Type::getInt8Ty(module_.getContext()), base, offset);
  }

  Module& module_;
  uint64_t& serial_;
  Type *word_, *number_, *pointer_;
  FunctionCallee lane_;
  Value *call_ = nullptr, *me_ = nullptr, *path_ = nullptr;
};

}  // namespace

PreservedAnalyses ConvergencePass::run(Module& module, ModuleAnalysisManager& modules) {
  auto& functions = modules.getResult<FunctionAnalysisManagerModuleProxy>(module).getManager();
  uint64_t serial = 0;
  Sites sites = convergent_calls(module);
  for (auto& [f, calls] : sites)
    Instrumenter(module, serial)
        .run(*f, calls, functions.getResult<LoopAnalysis>(*f),
             functions.getResult<DominatorTreeAnalysis>(*f));
  return PreservedAnalyses::none();
}

}  // namespace softmetal
