// Address spaces, section 4. In SYCL mode clang's default space includes the others; Metal's `thread` does
// not. So implicit conversions to the default space are refused here, except copies of whole objects. `this`
// of a member function points to thread memory unless the function is qualified. From 4.1 on it is generic:
// it points to memory of any kind but constant, as do pointers and references declared without an address
// space.
#include <clang/Basic/SourceManager.h>
#include <llvm/ADT/StringExtras.h>

#include "rules.h"

namespace softmetal::rules {
namespace {
using namespace clang;

// The conversion to the default space at the root of an expression, or null.
const ImplicitCastExpr* conversion(const Expr* e) {
  for (;;) {
    e = e->IgnoreParens();
    if (const auto* temporary = dyn_cast<MaterializeTemporaryExpr>(e)) {
      e = temporary->getSubExpr();
    } else if (const auto* cast = dyn_cast<ImplicitCastExpr>(e)) {
      if (cast->getCastKind() == CK_AddressSpaceConversion) return cast;
      e = cast->getSubExpr();
    } else {
      return nullptr;
    }
  }
}

QualType place_of(const Expr* e) {
  return e->getType()->isPointerType() ? e->getType()->getPointeeType() : e->getType();
}

// Whether `e` is *this or a part of it, or their address.
bool is_part_of_this(const Expr* e) {
  for (;;) {
    e = e->IgnoreParens();
    if (isa<CXXThisExpr>(e)) return true;
    if (const auto* cast = dyn_cast<CastExpr>(e)) {
      if (cast->getCastKind() == CK_LValueToRValue) return false;
      e = cast->getSubExpr();
    } else if (const auto* member = dyn_cast<MemberExpr>(e)) {
      if (member->getType()->isReferenceType()) return false;
      if (const auto* field = dyn_cast<FieldDecl>(member->getMemberDecl());
          !field || field->getType()->isReferenceType())
        return false;
      e = member->getBase();
    } else if (const auto* element = dyn_cast<ArraySubscriptExpr>(e)) {
      e = element->getBase();
    } else if (const auto* unary = dyn_cast<UnaryOperator>(e);
               unary && (unary->getOpcode() == UO_AddrOf || unary->getOpcode() == UO_Deref)) {
      e = unary->getSubExpr();
    } else {
      return false;
    }
  }
}

// A conditional expression with arms in two address spaces is a copy. Returns the one that contains `e`, or
// null.
const ConditionalOperator* copied_place(const Expr* e) {
  for (;;) {
    e = e->IgnoreParenImpCasts();
    if (const auto* member = dyn_cast<MemberExpr>(e); member && !member->isArrow()) {
      e = member->getBase();
    } else if (const auto* swizzle = dyn_cast<ExtVectorElementExpr>(e); swizzle && !swizzle->isArrow()) {
      e = swizzle->getBase();
    } else if (const auto* element = dyn_cast<ArraySubscriptExpr>(e);
               element && !element->getBase()->IgnoreParenImpCasts()->getType()->isPointerType()) {
      e = element->getBase();
    } else if (const auto* comma = dyn_cast<BinaryOperator>(e); comma && comma->getOpcode() == BO_Comma) {
      e = comma->getRHS();
    } else {
      break;
    }
  }
  const auto* conditional = dyn_cast<ConditionalOperator>(e);
  if (!conditional || !conditional->isGLValue() || conditional->isTypeDependent()) return nullptr;
  const Expr* arms[] = {conditional->getTrueExpr()->IgnoreParenImpCasts(),
                        conditional->getFalseExpr()->IgnoreParenImpCasts()};
  if (space_of(arms[0]->getType()) != space_of(arms[1]->getType())) return conditional;
  for (const Expr* arm : arms)
    if (const auto* copied = copied_place(arm)) return copied;
  return nullptr;
}

// Whether the type's address space comes from a template argument or `auto` instead of being written.
bool space_was_deduced(const ASTContext& context, QualType type) {
  if (space_of(type) == Space::kThread) return false;
  for (;;) {
    if (type.getLocalQualifiers().hasAddressSpace()) return false;
    if (isa<SubstTemplateTypeParmType, AutoType>(type.getTypePtr())) return true;
    const QualType next = type.getSingleStepDesugaredType(context);
    if (next.getAsOpaquePtr() == type.getAsOpaquePtr()) return false;
    type = next;
  }
}

bool points_by_deduction(const ASTContext& context, QualType type) {
  if (!type->isPointerType() && !type->isReferenceType()) return false;
  return space_was_deduced(context, type->getPointeeType());
}

// Whether the declaration of the name spells `thread`.
bool says_thread(const SourceManager& sources, SourceLocation name) {
  name = sources.getFileLoc(name);
  StringRef text = sources.getBufferData(sources.getFileID(name)).take_front(sources.getFileOffset(name));
  return text.drop_front(text.find_last_of(",;(){}") + 1).contains("SOFTMETAL_THREAD");
}

class AddressSpaces : public Family {
 public:
  using Family::Family;

  void declaration(const Decl* declaration) override {
    if (const auto* variable = dyn_cast<VarDecl>(declaration); variable && !isa<ParmVarDecl>(variable)) {
      if (points_by_deduction(program.context, variable->getType()) && !is_generic(variable))
        program.refuse(variable->getLocation(),
                       "'" + variable->getName() +
                           "' is declared to point to thread memory, but its initialiser is in " +
                           name_of(space_of(variable->getType()->getPointeeType())) + " memory");
      if (variable->hasInit()) check_place(variable->getType(), variable->getInit());
      if (variable->hasInit() && !variable->getType()->isDependentType())
        check_binding(variable, variable->getType(), variable->getInit(),
                      "'" + variable->getName().str() + "'");
    }
    if (const auto* function = dyn_cast<FunctionDecl>(declaration)) check_instantiation(function);
  }

  void statement(const Stmt* statement) override {
    if (const auto* construct = dyn_cast<CXXConstructExpr>(statement)) check_construction(construct);
    if (const auto* call = dyn_cast<CallExpr>(statement)) check_call(call);
    if (const auto* operation = dyn_cast<BinaryOperator>(statement); operation && operation->isAssignmentOp())
      refuse_copied(operation->getLHS());
    if (const auto* operation = dyn_cast<UnaryOperator>(statement);
        operation && (operation->isIncrementDecrementOp() || operation->getOpcode() == UO_AddrOf))
      refuse_copied(operation->getSubExpr());
    if (const auto* result = dyn_cast<ReturnStmt>(statement);
        result && result->getRetValue() && program.function) {
      check_place(program.function->getReturnType(), result->getRetValue());
      check_binding(program.function, program.function->getReturnType(), result->getRetValue(),
                    "the result of '" + program.function->getNameAsString() + "'");
    }
    if (const auto* assignment = dyn_cast<BinaryOperator>(statement);
        assignment && assignment->getOpcode() == BO_Assign)
      settle_generic(assigned(assignment->getLHS()), assignment->getRHS());
    if (const auto* list = dyn_cast<InitListExpr>(statement)) check_fields(list);
    if (const auto* cast = dyn_cast<ImplicitCastExpr>(statement);
        cast && cast->getCastKind() == CK_AddressSpaceConversion && !settled_.count(cast)) {
      const bool is_pointer = cast->getType()->isPointerType();
      program.refuse(cast->getBeginLoc(), std::string("a ") + (is_pointer ? "pointer" : "reference") +
                                              " to " + source(cast) + " memory ('" +
                                              spelled(program, cast->getSubExpr()->getType()) +
                                              "') does not convert to one to thread memory");
    }
  }

 private:
  void refuse_copied(const Expr* place) {
    if (const ConditionalOperator* copy = copied_place(place))
      program.refuse(copy->getBeginLoc(),
                     "the arms of this conditional expression are in two address spaces, so it is a copy: it "
                     "cannot be assigned to, and no reference or pointer to it can be taken");
  }

  void check_place(QualType type, const Expr* value) {
    if (type->isLValueReferenceType() && !type->getPointeeType().isConstQualified()) refuse_copied(value);
  }

  // Conversions that were checked together with the expression around them.
  std::set<const ImplicitCastExpr*> settled_;

  // Whether a pointer, reference or result is declared without an address space, as 4.1 allows.
  bool is_generic(const DeclaratorDecl* declared) const {
    return program.version >= 410 && declared && !program.is_library(declared) &&
           !says_thread(program.context.getSourceManager(), declared->getLocation());
  }

  // True if `value` converts to a generic pointer or reference, as values in any space but constant do.
  bool settle_generic(const DeclaratorDecl* target, const Expr* value) {
    const ImplicitCastExpr* cast = is_generic(target) ? conversion(value) : nullptr;
    if (!cast || space_of(place_of(cast->getSubExpr())) == Space::kConstant) return false;
    settled_.insert(cast);
    return true;
  }

  static const DeclaratorDecl* assigned(const Expr* e) {
    e = e->IgnoreParens();
    if (const auto* member = dyn_cast<MemberExpr>(e))
      return dyn_cast<DeclaratorDecl>(member->getMemberDecl());
    if (const auto* name = dyn_cast<DeclRefExpr>(e)) return dyn_cast<DeclaratorDecl>(name->getDecl());
    return nullptr;
  }

  void check_fields(const InitListExpr* list) {
    const auto* record = list->getType()->getAsCXXRecordDecl();
    if (!record || record->isUnion() || record->getNumBases()) return;
    unsigned i = 0;
    for (const FieldDecl* field : record->fields())
      if (i < list->getNumInits()) settle_generic(field, list->getInit(i++));
  }

  static const char* source(const ImplicitCastExpr* cast) {
    return name_of(space_of(place_of(cast->getSubExpr())));
  }

  void check_construction(const CXXConstructExpr* construct) {
    const CXXConstructorDecl* constructor = construct->getConstructor();
    const bool copies = constructor->isCopyOrMoveConstructor() && !constructor->isUserProvided();
    for (unsigned i = 0; i < construct->getNumArgs(); ++i) {
      if (copies || program.is_library(constructor))
        settle(construct->getArg(i));
      else if (i < constructor->getNumParams())
        check_argument(constructor->getParamDecl(i), construct->getArg(i),
                       constructor->getParent()->getNameAsString());
    }
  }

  void check_call(const CallExpr* call) {
    const FunctionDecl* callee = call->getDirectCallee();
    if (!callee) return;
    const auto* method = dyn_cast<CXXMethodDecl>(callee);
    unsigned first = 0;
    if (const auto* member_call = dyn_cast<CXXMemberCallExpr>(call)) {
      if (method) check_object(method, member_call->getImplicitObjectArgument());
    } else if (isa<CXXOperatorCallExpr>(call) && method && !method->isStatic()) {
      check_object(method, call->getArg(0));
      first = 1;
    }
    const bool copies = method && method->isDefaulted() && !method->isUserProvided();
    for (unsigned i = first; i < call->getNumArgs(); ++i) {
      if (i - first >= callee->getNumParams()) break;
      const ParmVarDecl* parameter = callee->getParamDecl(i - first);
      const QualType type = parameter->getType();
      check_place(type, call->getArg(i));
      const bool takes_any = program.is_library(callee) &&
                             (isa<CXXOperatorCallExpr>(call) ||
                              (type->isReferenceType() && type->getPointeeType().isConstQualified()));
      if (copies || takes_any)
        settle(call->getArg(i));
      else
        check_argument(parameter, call->getArg(i), callee->getNameAsString());
    }
  }

  void settle(const Expr* e) {
    if (const ImplicitCastExpr* cast = conversion(e)) settled_.insert(cast);
  }

  void check_argument(const ParmVarDecl* parameter, const Expr* argument, const std::string& callee) {
    const std::string name = parameter->getNameAsString();
    const std::string what =
        name.empty() ? "a parameter of '" + callee + "'" : "parameter '" + name + "' of '" + callee + "'";
    if (settle_generic(parameter, argument)) return;
    if (const ImplicitCastExpr* cast = conversion(argument)) {
      settled_.insert(cast);
      program.refuse(argument->getBeginLoc(), what + " points to thread memory, and the argument ('" +
                                                  spelled(program, cast->getSubExpr()->getType()) +
                                                  "') is in " + source(cast) + " memory");
      return;
    }
    check_binding(parameter, parameter->getType(), argument, what);
  }

  // `this` of `method`, called on `object`.
  void check_object(const CXXMethodDecl* method, const Expr* object) {
    const ImplicitCastExpr* cast = conversion(object);
    if (cast) settled_.insert(cast);
    if (program.is_library(method) || method->isImplicit() ||
        (method->isDefaulted() && !method->isUserProvided()))
      return;
    Space space = cast ? space_of(place_of(cast->getSubExpr())) : Space::kThread;
    bool is_any = false;
    if (!cast && is_part_of_this(object)) {
      const auto* inside = dyn_cast_or_null<CXXMethodDecl>(program.function);
      const auto own = inside ? spaces_of(inside) : std::vector<StringRef>();
      if (own.size() > 1 || isa_and_nonnull<CXXConstructorDecl>(inside)) return;
      if (own.size() == 1)
        space = named(own[0]);
      else
        is_any = program.version >= 410 && inside;
    }
    const auto takes = spaces_of(method);
    if (takes.empty() && program.version >= 410) return;
    if (!is_any) {
      if (takes.empty() && space == Space::kThread) return;
      for (StringRef one : takes)
        if (named(one) == space) return;
    }
    const std::string wanted = takes.empty() ? "thread" : takes.front().str();
    program.refuse(object->getBeginLoc(),
                   "member function '" + method->getNameAsString() + "' is for objects in " + wanted +
                       " memory, and this one is in " +
                       (is_any ? "memory of any kind" : name_of(space) + std::string(" memory")));
  }

  // The address spaces that a member function is qualified with.
  static std::vector<StringRef> spaces_of(const CXXMethodDecl* method) {
    std::vector<StringRef> spaces;
    for (StringRef list : annotations(method, "this"))
      for (StringRef space : llvm::split(list, ' ')) spaces.push_back(space);
    return spaces;
  }

  static Space named(StringRef text) {
    if (text == "device") return Space::kDevice;
    if (text == "threadgroup") return Space::kThreadgroup;
    return text == "constant" ? Space::kConstant : Space::kThread;
  }

  // From 4.1 on, a part of *this is not in thread memory in a member function that does not say `thread`.
  void check_binding(const DeclaratorDecl* declared, QualType target, const Expr* value,
                     const std::string& what) {
    if (program.version < 410 || settle_generic(declared, value) || is_generic(declared)) return;
    const auto* method = dyn_cast_or_null<CXXMethodDecl>(program.function);
    if (!method || isa<CXXConstructorDecl, CXXDestructorDecl>(method) || !spaces_of(method).empty()) return;
    if (method->getParent()->isLambda()) return;
    const bool binds = target->isLValueReferenceType() && value->isGLValue();
    if (!binds && !target->isPointerType()) return;
    if (space_of(target->getPointeeType()) != Space::kThread || !is_part_of_this(value)) return;
    program.refuse(value->getBeginLoc(),
                   what + " points to thread memory, and from MSL 4.1 on `this` may point to any: declare '" +
                       method->getNameAsString() + "' with `thread` after its parameters");
  }

  // f(thread T*) called with a device pointer: C++ deduces `device` into T.
  void check_instantiation(const FunctionDecl* function) {
    if (!function->isTemplateInstantiation() || function->getPointOfInstantiation().isInvalid()) return;
    if (program.is_library(function->getPointOfInstantiation())) return;
    for (const ParmVarDecl* parameter : function->parameters()) {
      if (!points_by_deduction(program.context, parameter->getType()) || is_generic(parameter)) continue;
      program.refuse(function->getPointOfInstantiation(),
                     "parameter '" + parameter->getNameAsString() + "' of '" + function->getNameAsString() +
                         "' points to thread memory, and the argument is in " +
                         name_of(space_of(parameter->getType()->getPointeeType())) + " memory");
    }
  }
};

}  // namespace

std::unique_ptr<Family> address_spaces(Program& program) { return std::make_unique<AddressSpaces>(program); }

}  // namespace softmetal::rules
