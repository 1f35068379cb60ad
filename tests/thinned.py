"""Tests of many like cases, most of which are slow: two cores run the quick ones in some minutes.

Of each test's cases one in so many is quick. Which ones is decided by a hash of their names, so
that it does not follow the order of any parameter. ``make test-slow`` runs the others.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

_INTERPRETED = "tests/kernels/triton_kernels/interpreted"
ONE_IN = {
    "tests/cli/test_cli_quantize.py": {
        "test_bad_input_is_one_line_and_nothing_is_written": 3,
    },
    "tests/cli/test_cli_serve.py": {
        "test_a_model_that_cannot_be_loaded_ends_it_with_one_line": 2,
    },
    "tests/engine/core/test_image_lives.py": {
        "test_texts_are_those_alone": 2,
    },
    "tests/engine/gguf/test_gguf_models.py": {
        "test_logits_equal_the_source": 2,
        "test_native_kernels_multiply_the_codes_as_they_lie": 2,
        "test_quantised_models_answer_as_their_widened_weights": 2,
    },
    "tests/engine/grammar/test_schemas.py": {
        "test_all_schemas_are_held": 3,
    },
    "tests/engine/grammar/test_waiting_masks.py": {
        "test_texts_are_those_of_masks_that_do_not_wait": 2,
    },
    "tests/engine/lora/test_lora.py": {
        "test_each_row_of_a_mixed_batch_equals_its_merged_model": 15,
        "test_layers_of_other_kinds_equal_their_merged_model": 6,
        "test_offline_each_prompt_has_its_adapter": 2,
        "test_prefixes_of_different_adapters_are_kept_apart": 6,
    },
    "tests/engine/lora/test_recorded_adapters.py": {
        "test_the_same_bits_as_steps_from_python": 3,
    },
    "tests/engine/models/audio/test_audio_memory.py": {
        "test_embeddings_take_no_more_memory_than_is_told": 2,
    },
    "tests/engine/models/test_images.py": {
        "test_another_image_is_another_text": 3,
        "test_logits_of_a_prompt_with_images": 5,
        "test_the_text_behind_images_goes_on": 3,
    },
    "tests/engine/models/test_parity.py": {
        "test_steps_of_few_tokens_take_norms_and_sums_along": 3,
    },
    "tests/engine/models/test_sparse_models.py": {
        "test_guesses_change_no_text": 2,
    },
    "tests/engine/models/test_text_parts.py": {
        "test_the_part_for_images_is_passed_over": 3,
    },
    "tests/engine/models/vision/test_tower_memory.py": {
        "test_embeddings_take_no_more_memory_than_is_told": 6,
    },
    "tests/engine/models/vision/test_tower_parity.py": {
        "test_embeddings_equal_hugging_faces": 5,
    },
    "tests/engine/parallel/test_captured_ranks.py": {
        "test_any_schedule_is_replayed": 2,
        "test_captured_steps_give_the_texts_of_launched_ones": 4,
        "test_rows_with_adapters_are_captured": 2,
        "test_texts_behind_images_turn_where_the_images_moved_them": 2,
    },
    "tests/engine/parallel/test_several_nodes.py": {
        "test_texts_are_hugging_faces": 3,
    },
    "tests/engine/parallel/test_shared_adapters.py": {
        "test_each_row_equals_its_merged_model": 3,
    },
    "tests/engine/parallel/test_shared_gemmas.py": {
        "test_each_row_equals_its_merged_model": 2,
        "test_greedy_texts_equal_hugging_face_under_any_schedule": 6,
        "test_more_ranks_than_heads_of_any_kind": 2,
        "test_rounded_models_are_shared_out": 3,
    },
    "tests/engine/parallel/test_shared_images.py": {
        "test_texts_are_those_of_one_process": 3,
    },
    "tests/engine/parallel/test_shared_logits.py": {
        "test_rounded_models_are_shared_out": 3,
        "test_two_ranks_say_what_hugging_face_says": 5,
    },
    "tests/engine/parallel/test_shared_states.py": {
        "test_each_row_equals_its_merged_model": 2,
        "test_greedy_texts_equal_hugging_face_under_any_schedule": 6,
        "test_rounded_models_are_shared_out": 3,
        "test_two_ranks_say_what_hugging_face_says": 3,
    },
    "tests/engine/parallel/test_shared_texts.py": {
        "test_greedy_texts_equal_hugging_face_under_any_schedule": 2,
    },
    "tests/engine/parallel/test_staged_kinds.py": {
        "test_each_row_has_its_adapter_in_every_stage": 2,
        "test_greedy_texts_equal_hugging_face_under_any_schedule": 6,
        "test_two_stages_compute_what_one_process_does": 2,
    },
    "tests/engine/parallel/test_staged_logits.py": {
        "test_three_stages_say_what_hugging_face_says": 5,
    },
    "tests/engine/parallel/test_staged_texts.py": {
        "test_each_row_has_its_adapter_in_every_stage": 3,
        "test_greedy_texts_equal_hugging_face_under_any_schedule": 6,
    },
    "tests/engine/quantization/test_formats.py": {
        "test_in_other_families_too": 2,
        "test_kernels_read_the_codes_as_they_are": 2,
        "test_logits_are_those_of_what_the_codes_stand_for": 2,
    },
    "tests/engine/quantization/test_quantization.py": {
        "test_the_demo_model_answers": 2,
    },
    "tests/engine/runner/test_cache_dtype.py": {
        "test_greedy_text_is_the_same_under_any_schedule_and_kernels": 2,
    },
    "tests/engine/runner/test_host_store.py": {
        "test_preempted_texts_are_the_same_and_hardly_computed_again": 4,
    },
    "tests/engine/runner/test_programs.py": {
        "test_the_same_bits_as_steps_from_python": 10,
        "test_the_steps_of_each_family_are_recorded": 8,
    },
    "tests/engine/runner/test_runner.py": {
        "test_greedy_text_equals_hugging_face_under_any_schedule": 8,
    },
    "tests/engine/runner/test_speculation.py": {
        "test_a_draft_model_that_is_seldom_asked_has_read_all": 2,
        "test_coupled_drafts_change_no_text_whatever_is_asked_for": 3,
        "test_greedy_text_is_the_same": 5,
    },
    "tests/engine/runner/test_state_drafts.py": {
        "test_a_planted_bug_is_noticed": 3,
        "test_a_step_with_drafts_that_fails_is_run_again": 3,
        "test_steps_with_drafts_are_captured": 3,
        "test_steps_with_drafts_are_recorded": 2,
        "test_texts_are_those_without_drafts": 24,
        "test_who_guesses_changes_no_text": 2,
    },
    "tests/engine/runner/test_states.py": {
        "test_a_prompt_that_comes_again_begins_with_a_snapshot": 2,
        "test_it_sleeps_and_wakes": 6,
    },
    "tests/engine/runner/test_verification.py": {
        "test_a_wrong_rule_is_noticed": 2,
    },
    "tests/engine/scheduler/test_lives.py": {
        "test_a_planted_bug_is_noticed": 4,
    },
    "tests/engine/scheduler/test_snapshot_lives.py": {
        "test_a_planted_bug_is_noticed": 4,
    },
    "tests/engine/speculation/test_draft_head.py": {
        "test_scores_are_those_of_the_twin": 6,
    },
    "tests/engine/speculation/test_draft_head_texts.py": {
        "test_a_head_that_is_seldom_asked_has_read_all": 3,
        "test_captured_passes_of_a_head_make_the_same_drafts": 3,
        "test_captured_steps_leave_a_head_what_it_reads": 2,
        "test_coupled_drafts_change_no_text_whatever_is_asked_for": 3,
        "test_greedy_text_is_the_same_and_foreseen": 24,
        "test_heads_that_read_at_the_wrong_place_foresee_little": 3,
        "test_rejection_leaves_greedy_text_and_draws_from_what_the_head_said": 3,
    },
    "tests/engine/test_beam_search.py": {
        "test_it_finds_what_hugging_face_finds": 4,
    },
    "tests/engine/test_llm_images.py": {
        "test_choices_about_an_image_are_those_of_their_seeds": 3,
        "test_prompts_are_those_of_hugging_faces_processors": 3,
        "test_what_is_said_of_images_is_what_hugging_face_says": 3,
    },
    "tests/engine/text/test_text_template.py": {
        "test_a_template_that_misbehaves_is_an_error_of_the_request": 2,
    },
    "tests/kernels/test_cpu_attention.py": {
        "test_long_rows_are_split_and_joined": 2,
        "test_single_queries_of_all_head_counts": 3,
    },
    "tests/kernels/test_cpu_experts.py": {
        "test_weights_in_panels": 3,
    },
    "tests/kernels/test_cpu_lanes.py": {
        "test_lanes": 8,
    },
    f"{_INTERPRETED}/test_triton_attention.py": {
        "test_blocks_behind_a_window_are_somebody_elses": 3,
        "test_codes_are_read_with_their_scales": 4,
        "test_invariant_queries_have_the_same_bits_in_any_chunk": 8,
        "test_mixed_batches_equal_the_definition": 10,
        "test_queries_that_look_ahead_equal_the_definition": 10,
        "test_shares_and_parts_cut_rows_anywhere": 12,
        "test_whole_tiles_are_copied_without_what_is_nobodys": 5,
    },
    f"{_INTERPRETED}/test_triton_channel_chunks.py": {
        "test_delta_rules": 2,
        "test_states_are_as_exact_as_sixteen_bits": 2,
    },
    f"{_INTERPRETED}/test_triton_drafts.py": {
        "test_drafts_are_judged_as_by_the_twin": 2,
        "test_shares_are_those_of_sorting": 6,
    },
    f"{_INTERPRETED}/test_triton_engine.py": {
        "test_layers_with_heads_of_their_own": 2,
    },
    f"{_INTERPRETED}/test_triton_inputs_moe.py": {
        "test_experts_equal_the_loop": 4,
        "test_experts_in_codes_equal_the_loop": 2,
        "test_what_experts_give_few_tokens_is_added_to_the_stream": 6,
    },
    f"{_INTERPRETED}/test_triton_latent.py": {
        "test_mixed_batches_equal_the_definition": 2,
    },
    f"{_INTERPRETED}/test_triton_layers.py": {
        "test_norm_rope_store": 2,
    },
    f"{_INTERPRETED}/test_triton_quantised.py": {
        "test_a_widened_weight_is_the_same_weight": 3,
        "test_products_equal_the_twins": 2,
        "test_sums_of_whole_groups_are_scaled": 3,
    },
    f"{_INTERPRETED}/test_triton_recurrent.py": {
        "test_convolutions": 3,
        "test_invariant_tokens_have_the_same_bits_in_any_cut": 3,
        "test_recurrences": 20,
        "test_tokens_on_trial_leave_nothing_but_what_stays": 10,
    },
    f"{_INTERPRETED}/test_triton_routing.py": {
        "test_choices_equal_the_twins": 6,
        "test_pairs_are_listed_by_expert": 4,
    },
    f"{_INTERPRETED}/test_triton_sampling.py": {
        "test_a_search_ends_whatever_the_numbers": 2,
        "test_any_rows_draw_as_by_sorting": 6,
        "test_draws_equal_those_of_sorting": 4,
        "test_likely_tokens_may_be_anywhere": 4,
    },
    f"{_INTERPRETED}/test_triton_selfcheck.py": {
        "test_attention_has_the_same_bits_or_is_not_taken_for_such": 4,
        "test_padding_of_states_may_be_anything_finite": 2,
        "test_right_kernels_pass": 12,
    },
    f"{_INTERPRETED}/test_triton_skinny.py": {
        "test_each_pair_of_token_and_expert_is_a_row": 2,
        "test_products_equal_the_twins": 20,
        "test_products_of_codes_equal_the_twins": 12,
    },
    f"{_INTERPRETED}/test_triton_units.py": {
        "test_half_precision": 2,
        "test_parts_are_of_nearly_the_same_size_and_one_for_a_program": 6,
        "test_texts_equal_the_definition": 20,
        "test_the_steps_tokens_are_read_after_the_turn": 16,
    },
    "tests/server/test_data_parallel.py": {
        "test_what_cannot_be_is_one_line": 2,
    },
    "tests/server/test_garbage.py": {
        "test_a_request_leaves_no_garbage": 2,
    },
    "tests/server/test_images_api.py": {
        "test_what_cannot_be_shown_is_named": 2,
    },
    "tests/server/test_openapi_fuzz.py": {
        "test_no_answer_is_undescribed": 12,
    },
    "tests/server/test_plain_errors.py": {
        "test_a_shape_that_is_not_whole_is_told_what_it_lacks": 3,
    },
    "tests/server/test_stacks.py": {
        "test_tasks_and_threads_are_told_on_sigusr1": 2,
    },
    "tests/server/test_states_server.py": {
        "test_texts_are_hugging_faces_alone_and_together": 2,
        "test_what_a_state_does_not_bear_is_refused_in_a_line": 2,
    },
    "tests/server/text/test_text_grammar.py": {
        "test_whatever_the_grammar_admits_is_read_as_calls": 3,
    },
    "tests/server/text/test_text_parser.py": {
        "test_calls_of_every_dialect": 5,
    },
    "tests/tools/test_quantize_model.py": {
        "test_perplexities_are_those_of_hugging_face_before_and_after": 6,
    },
}


def mark_thinned(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of ``ONE_IN`` that are not quick as slow."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            function = getattr(item, "originalname", None)
            cases[item.path.relative_to(ROOT).as_posix(), function].append(item)
    for file, functions in ONE_IN.items():
        for function, one_in in functions.items():
            found = cases[file, function]
            found.sort(key=lambda item: zlib.crc32(item.name.encode()))
            for item in found[-(-len(found) // one_in) :]:
                item.add_marker(pytest.mark.slow)
