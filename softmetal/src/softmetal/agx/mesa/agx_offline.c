/*
 * Compiles one SPIR-V kernel to AGX machine code without a device, and prints
 * its resources after the listing of AGX_MESA_DEBUG=shaders. Derived from
 * Mesa's asahi_clc.c:
 *    Copyright 2023 Alyssa Rosenzweig
 *    Copyright 2020 Intel Corporation
 *    SPDX-License-Identifier: MIT
 */

#include <stdio.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include "asahi/compiler/agx_compile.h"
#include "asahi/compiler/agx_nir.h"
#include "compiler/glsl_types.h"
#include "compiler/spirv/nir_spirv.h"
#include "util/os_file.h"
#include "nir.h"
#include "nir_builder.h"
#include "nir_precompiled.h"

static const struct spirv_to_nir_options spirv_options = {
   .environment = NIR_SPIRV_OPENCL,
   .shared_addr_format = nir_address_format_32bit_offset_as_64bit,
   .global_addr_format = nir_address_format_62bit_generic,
   .temp_addr_format = nir_address_format_62bit_generic,
   .constant_addr_format = nir_address_format_64bit_global,
   .create_library = true,
};

static void
optimize(nir_shader *nir)
{
   bool progress;
   do {
      progress = false;

      NIR_PASS(progress, nir, nir_split_var_copies);
      NIR_PASS(progress, nir, nir_split_struct_vars, nir_var_function_temp);
      NIR_PASS(progress, nir, nir_lower_var_copies);
      NIR_PASS(progress, nir, nir_lower_vars_to_ssa);

      NIR_PASS(progress, nir, nir_copy_prop);
      NIR_PASS(progress, nir, nir_opt_remove_phis);
      NIR_PASS(progress, nir, nir_lower_phis_to_scalar, true);
      NIR_PASS(progress, nir, nir_opt_dce);
      NIR_PASS(progress, nir, nir_opt_dead_cf);
      NIR_PASS(progress, nir, nir_opt_cse);
      NIR_PASS(progress, nir, nir_opt_peephole_select, 8, false, true);
      NIR_PASS(progress, nir, nir_opt_phi_precision);
      NIR_PASS(progress, nir, nir_opt_algebraic);
      NIR_PASS(progress, nir, nir_opt_constant_folding);

      NIR_PASS(progress, nir, nir_opt_deref);
      NIR_PASS(progress, nir, nir_opt_copy_prop_vars);
      NIR_PASS(progress, nir, nir_opt_undef);

      NIR_PASS(progress, nir, nir_opt_shrink_vectors, true);
      NIR_PASS(progress, nir, nir_opt_loop_unroll);
   } while (progress);
}

/*
 * NIR assumes finite numbers unless an operation is exact: it would fold
 * fma(x, 0, y) to y, which is wrong if x is infinite, and delete instructions
 * that Apple's compiler must keep. Divisions and roots stay inexact: exact ones
 * would be corrected to half a ulp, which Metal's fast:: functions are not.
 */
static bool
make_exact(UNUSED nir_builder *b, nir_alu_instr *alu, UNUSED void *data)
{
   switch (alu->op) {
   case nir_op_fdiv:
   case nir_op_frcp:
   case nir_op_frsq:
   case nir_op_fsqrt:
      return false;
   default:
      alu->exact = true;
      return true;
   }
}

static nir_shader *
compile(const uint32_t *spirv, size_t size, bool fast_math)
{
   nir_shader *nir =
      spirv_to_nir(spirv, size / 4, NULL, 0, MESA_SHADER_KERNEL, "library",
                   &spirv_options, &agx_nir_options);
   if (!nir)
      return NULL;

   nir_validate_shader(nir, "after spirv_to_nir");
   if (!fast_math)
      NIR_PASS(_, nir, nir_shader_alu_pass, make_exact, nir_metadata_all, NULL);
   nir_fixup_is_exported(nir);

   NIR_PASS(_, nir, nir_lower_system_values);
   NIR_PASS(_, nir, nir_lower_calls_to_builtins);

   nir_lower_compute_system_values_options cs = {.global_id_is_32bit = true};
   NIR_PASS(_, nir, nir_lower_compute_system_values, &cs);

   NIR_PASS(_, nir, nir_lower_variable_initializers, nir_var_function_temp);
   NIR_PASS(_, nir, nir_lower_returns);
   NIR_PASS(_, nir, nir_inline_functions);
   nir_remove_non_exported(nir);
   NIR_PASS(_, nir, nir_copy_prop);
   NIR_PASS(_, nir, nir_opt_deref);

   nir_lower_constant_to_temp(nir);
   NIR_PASS(_, nir, nir_lower_variable_initializers, ~0);

   NIR_PASS(_, nir, nir_lower_vars_to_explicit_types,
            nir_var_uniform | nir_var_shader_temp | nir_var_function_temp |
               nir_var_mem_shared | nir_var_mem_global,
            glsl_get_cl_type_size_align);

   optimize(nir);
   NIR_PASS(_, nir, nir_remove_dead_variables, nir_var_all, NULL);
   NIR_PASS(_, nir, nir_lower_vars_to_explicit_types,
            nir_var_shader_temp | nir_var_function_temp | nir_var_mem_shared |
               nir_var_mem_global | nir_var_mem_constant,
            glsl_get_cl_type_size_align);

   NIR_PASS(_, nir, nir_lower_memcpy);
   NIR_PASS(_, nir, nir_lower_explicit_io, nir_var_mem_constant,
            nir_address_format_64bit_global);
   NIR_PASS(_, nir, nir_lower_explicit_io, nir_var_uniform,
            nir_address_format_32bit_offset_as_64bit);

   NIR_PASS(_, nir, nir_lower_convert_alu_types, NULL);
   NIR_PASS(_, nir, nir_opt_if, 0);
   NIR_PASS(_, nir, nir_opt_idiv_const, 16);
   optimize(nir);
   return nir;
}

/* Kernel arguments are in uniform registers, as in Metal's ABI. */
static nir_def *
load_kernel_input(nir_builder *b, unsigned num_components, unsigned bit_size,
                  unsigned offset_B)
{
   return nir_load_preamble(b, num_components, bit_size, .base = offset_B / 2);
}

int
main(int argc, char **argv)
{
   bool fast_math = argc == 3 && !strcmp(argv[2], "--fast-math");
   if (argc != 2 && !fast_math) {
      fprintf(stderr, "usage: %s kernel.spv [--fast-math]\n", argv[0]);
      return 1;
   }

   size_t size = 0;
   char *spirv = os_read_file(argv[1], &size);
   if (!spirv) {
      fprintf(stderr, "cannot read %s\n", argv[1]);
      return 1;
   }

   glsl_type_singleton_init_or_ref();
   nir_shader *library = compile((const uint32_t *)spirv, size, fast_math);
   if (!library)
      return 1;

   struct nir_precomp_opts opt = {.arg_align_B = 2};

   nir_foreach_entrypoint(function, library) {
      struct nir_precomp_layout layout =
         nir_precomp_derive_layout(&opt, function);
      nir_shader *s = nir_precompiled_build_variant(
         function, 0, &agx_nir_options, &opt, load_kernel_input);
      agx_link_libagx(s, library);

      NIR_PASS(_, s, nir_lower_vars_to_explicit_types, nir_var_mem_shared,
               glsl_get_cl_type_size_align);
      NIR_PASS(_, s, nir_lower_explicit_io, nir_var_mem_shared,
               nir_address_format_32bit_offset_as_64bit);

      bool progress;
      do {
         progress = false;
         NIR_PASS(progress, s, nir_opt_loop);
      } while (progress);

      s->info.internal = false; /* prints it */
      agx_preprocess_nir(s, NULL);

      struct agx_shader_part compiled;
      struct agx_shader_key key = {
         .libagx = library,
         .promote_constants = true,
         .has_scratch = true,
         .reserved_preamble = layout.size_B / 2,
         .dev.needs_g13x_coherency = U_TRISTATE_NO,
      };
      agx_compile_shader_nir(s, &key, NULL, &compiled);

      const struct agx_shader_info *info = &compiled.info;
      struct agx_occupancy occupancy =
         agx_occupancy_for_register_count(info->nr_gprs - 1);
      printf("KERNEL: {\"kernel\": \"%s\", \"half_registers\": %u, "
             "\"preamble_half_registers\": %u, \"threads\": %u, "
             "\"uniform_halves\": %u, \"scratch_words\": %u, "
             "\"threadgroup_bytes\": %u, \"code_bytes\": %u, "
             "\"main_offset\": %u}\n",
             function->name, info->nr_gprs, info->nr_preamble_gprs,
             occupancy.max_threads, info->push_count, info->scratch_size,
             info->local_size, info->main_size, info->main_offset);
   }

   return 0;
}
