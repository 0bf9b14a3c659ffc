// Features of C++ that Metal lacks, section 1.5, and objects in constant and threadgroup memory, section 4.
#include <tuple>

#include "rules.h"

namespace softmetal::rules {
namespace {
using namespace clang;

class Declarations : public Family {
 public:
  using Family::Family;

  void declaration(const Decl* declaration) override {
    if (const auto* value = dyn_cast<ValueDecl>(declaration); value && isa<VarDecl, FieldDecl>(value)) {
      check_function_pointer(value);
      check_wide_integer(value);
    }
    if (const auto* record = dyn_cast<RecordDecl>(declaration)) check_ids(record);
    if (const auto* variable = dyn_cast<VarDecl>(declaration)) {
      check_extern(variable);
      check_static(variable);
      check_sampler(variable);
      check_constant(variable);
      check_threadgroup(variable);
    }
    if (const auto* function = dyn_cast<FunctionDecl>(declaration); function && function->isVariadic())
      program.refuse(function->getLocation(),
                     "'" + function->getNameAsString() +
                         "' takes any arguments (...): Metal has no variadic functions, only "
                         "variadic templates");
  }

  void statement(const Stmt* statement) override {
    if (const auto* construct = dyn_cast<CXXConstructExpr>(statement)) check_construction(construct);
    if (const auto* query = dyn_cast<CXXNoexceptExpr>(statement))
      program.refuse(query->getBeginLoc(), "Metal has no noexcept operator");
    if (const auto* literal = dyn_cast<StringLiteral>(statement); literal && literal->getCharByteWidth() > 1)
      program.refuse(literal->getBeginLoc(), "Metal has no wide characters");
    if (const auto* literal = dyn_cast<CharacterLiteral>(statement);
        literal && literal->getKind() != CharacterLiteralKind::Ascii)
      program.refuse(literal->getLocation(), "Metal has no wide characters");
  }

 private:
  std::set<const CXXConstructExpr*> constants_;  // samplers

  void check_function_pointer(const ValueDecl* value) {
    const QualType type = value->getType();
    if (type->isDependentType()) return;
    QualType base = program.context.getBaseElementType(type.getNonReferenceType());
    if (base->isFunctionPointerType() || base->isMemberPointerType() || base->isFunctionType())
      program.refuse(
          value->getLocation(),
          "'" + value->getName() +
              "' is a pointer to a function or member, which Metal does not have: pass a template argument");
  }

  void check_wide_integer(const ValueDecl* value) {
    const QualType type = program.context.getBaseElementType(value->getType().getNonReferenceType());
    if (type->isDependentType()) return;
    if (type->isSpecificBuiltinType(BuiltinType::LongLong) ||
        type->isSpecificBuiltinType(BuiltinType::ULongLong) ||
        type->isSpecificBuiltinType(BuiltinType::Int128) || type->isSpecificBuiltinType(BuiltinType::UInt128))
      program.refuse(value->getLocation(), "Metal has no long long: long has 64 bits");
  }

  void check_extern(const VarDecl* variable) {
    if (variable->getStorageClass() == SC_Extern && !variable->hasAttr<AsmLabelAttr>())
      program.refuse(variable->getLocation(),
                     "Metal has no extern variables ('" + variable->getName() + "')");
  }

  // Section 4.2; static members of a class inside a function count as static variables, too.
  void check_static(const VarDecl* variable) {
    const bool is_member = variable->isStaticDataMember() && variable->getParentFunctionOrMethod();
    if (!variable->isStaticLocal() && !is_member) return;
    if (space_of(program.context.getBaseElementType(variable->getType())) != Space::kConstant)
      program.refuse(variable->getLocation(), "static variable '" + variable->getName() +
                                                  "' must reside in the constant address space");
  }

  // Section 2.10: a sampler is an argument or a constant expression.
  void check_sampler(const VarDecl* variable) {
    if (!variable->hasInit() || !is_library_class(variable->getType(), "sampler")) return;
    const auto* construct = dyn_cast<CXXConstructExpr>(variable->getInit()->IgnoreImplicit());
    if (!construct || construct->getConstructor()->isCopyOrMoveConstructor()) return;
    constants_.insert(construct);
    if (!variable->isConstexpr())
      program.refuse(variable->getLocation(),
                     "sampler '" + variable->getName() + "' must be constexpr, or a parameter");
  }

  void check_construction(const CXXConstructExpr* construct) {
    const QualType type = construct->getType();
    if (program.is_library(construct->getBeginLoc()) ||
        construct->getConstructor()->isCopyOrMoveConstructor())
      return;
    if (is_library_class(type, "sampler") && !constants_.count(construct))
      program.refuse(construct->getBeginLoc(), "a sampler must be a constexpr variable, or a parameter");
    if (construct->getNumArgs() == 0 && holds_handle(type))
      program.refuse(construct->getBeginLoc(), "'" + spelled(program, type.getUnqualifiedType()) +
                                                   "' has no default: it comes as an argument");
  }

  bool is_library_class(QualType type, StringRef name) const {
    const CXXRecordDecl* record = program.context.getBaseElementType(type)->getAsCXXRecordDecl();
    return record && record->getIdentifier() && record->getName() == name && program.is_library(record);
  }

  bool holds_handle(QualType type) const {
    const CXXRecordDecl* record = program.context.getBaseElementType(type)->getAsCXXRecordDecl();
    if (!record || !record->hasDefinition() || record->isDependentContext()) return false;
    if (record->getIdentifier() && record->getName() == "Handle" && program.is_library(record)) return true;
    return llvm::any_of(record->bases(), [&](const auto& base) { return holds_handle(base.getType()); }) ||
           llvm::any_of(record->fields(),
                        [&](const FieldDecl* field) { return holds_handle(field->getType()); });
  }

  // Members of an argument buffer; an array takes one id per element.
  void check_ids(const RecordDecl* record) {
    std::vector<std::tuple<uint64_t, uint64_t, const FieldDecl*>> taken;
    for (const FieldDecl* field : record->fields())
      for (StringRef text : annotations(field, "id")) {
        uint64_t first, count = 1;
        if (text.getAsInteger(0, first)) continue;
        QualType type = field->getType();
        while (const auto* array = program.context.getAsConstantArrayType(type)) {
          count *= array->getSize().getZExtValue();
          type = array->getElementType();
        }
        if (const auto* array = dyn_cast_or_null<ClassTemplateSpecializationDecl>(type->getAsCXXRecordDecl());
            array && array->getName() == "array" && program.is_library(array))
          count *= array->getTemplateArgs()[1].getAsIntegral().getZExtValue();
        for (const auto& [from, to, other] : taken)
          if (first < to && from < first + count)
            program.refuse(field->getLocation(), "'" + other->getName() + "' and '" + field->getName() +
                                                     "' have the same id " + Twine(std::max(first, from)));
        taken.emplace_back(first, first + count, field);
      }
  }

  // A constant at program scope. The translator turns function constants, and constants that depend on them,
  // into variables.
  void check_constant(const VarDecl* variable) {
    if (!variable->hasGlobalStorage() || variable->getType()->isDependentType()) return;
    if (space_of(program.context.getBaseElementType(variable->getType())) != Space::kConstant ||
        !variable->hasInit())
      return;
    if (variable->getInit()->isValueDependent() ||
        variable->getInit()->isConstantInitializer(program.context, false))
      return;
    program.refuse(variable->getLocation(),
                   "the initialiser of '" + variable->getName() + "' is not a constant expression");
  }

  // Metal's matrices have constructors, even if the host headers' matrices do not.
  bool needs_construction(QualType type) {
    const CXXRecordDecl* record = program.context.getBaseElementType(type)->getAsCXXRecordDecl();
    if (!record || !record->hasDefinition()) return false;
    // A constructor qualified `threadgroup` is run (MLX's complex_t).
    for (const CXXConstructorDecl* constructor : record->ctors())
      if (constructor->isDefaultConstructor())
        for (StringRef spaces : annotations(constructor, "this"))
          if (spaces.contains("threadgroup")) return false;
    if (!record->hasTrivialDefaultConstructor()) return true;
    if (record->getIdentifier() && record->getName() == "matrix" && program.is_library(record)) return true;
    return llvm::any_of(record->fields(),
                        [&](const FieldDecl* field) { return needs_construction(field->getType()); });
  }

  // The translator turns threadgroup variables into references to storage of the threadgroup.
  void check_threadgroup(const VarDecl* variable) {
    if (!variable->hasInit()) return;
    const auto* call = dyn_cast<CallExpr>(variable->getInit()->IgnoreImplicit());
    const FunctionDecl* callee = call ? call->getDirectCallee() : nullptr;
    if (!callee || !callee->getIdentifier() || callee->getName() != "threadgroup_variable" ||
        !program.is_library(callee))
      return;
    const QualType type = program.context.getBaseElementType(variable->getType().getNonReferenceType());
    const CXXRecordDecl* record = type->getAsCXXRecordDecl();
    if (!record || !record->hasDefinition()) return;
    if (needs_construction(type))
      program.refuse(variable->getLocation(), "threadgroup variable '" + variable->getName() +
                                                  "' is of a type with a constructor ('" +
                                                  spelled(program, type.getUnqualifiedType()) +
                                                  "'), which threadgroup memory does not run");
    else if (!record->hasTrivialDestructor())
      program.refuse(variable->getLocation(),
                     "threadgroup variable '" + variable->getName() + "' is of a type with a destructor");
  }
};

}  // namespace

std::unique_ptr<Family> declarations(Program& program) { return std::make_unique<Declarations>(program); }

}  // namespace softmetal::rules
