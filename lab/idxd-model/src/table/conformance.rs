//! The requirements of the specification, and the tests that show each. `docs/accelerators-conformance.md` is generated
//! from these rows; a test checks that both agree, and that every test named here exists.

use std::fmt::Write;

/// One requirement.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Section or table, of the DSA specification unless it names IAA.
    pub section: &'static str,
    /// The requirement, paraphrased.
    pub requires: &'static str,
    /// Function names of tests of this crate.
    pub tests: &'static [&'static str],
}

macro_rules! rows {
    ($($section:literal: $requires:literal => $($test:ident),+;)*) => {
        /// All rows, by section.
        pub const ROWS: &[Row] =
            &[$(Row { section: $section, requires: $requires, tests: &[$(stringify!($test)),+] }),*];
    };
}

rows! {
    "3.8": "a batch's members are executed in any order, and its record follows all of theirs"
        => members_complete_in_an_order_that_the_seed_chooses_and_the_batch_after_them, batches_count_and_abandon_by_their_fences;
    "3.9": "Fence waits for everything before it in the batch"
        => a_fence_waits_for_everything_before_it;
    "3.9": "after a member without success, the next fenced one and all behind it are abandoned"
        => a_fence_abandons_itself_and_all_behind_it, batches_count_and_abandon_by_their_fences;
    "3.9": "without Fence the others are executed though one has failed"
        => without_a_fence_the_others_run_though_one_has_failed;
    "3.12": "Drain completes after everything before it in its queue"
        => a_drain_completes_after_everything_that_was_before_it;
    "3.13.1": "without address translation service a faulting write is lost silently, a faulting read is 0x20"
        => without_translation_service_a_faulting_write_is_lost_without_a_report, without_translation_service_a_record_that_faults_is_lost_without_a_report;
    "3.13.2": "Block On Fault: the page is requested and the engine waits"
        => block_on_fault_waits_for_the_page, a_page_request_holds_up_the_engine, a_descriptor_may_need_any_number_of_page_requests, an_untouched_page_faults_and_a_page_request_maps_it;
    "3.13.2": "record addresses and descriptor lists always block on fault"
        => record_addresses_always_block_on_fault, a_lists_page_is_requested_even_without_block_on_fault;
    "3.13.3": "a record that faults goes to the event log, and is copied later"
        => with_the_event_log_the_kernel_copies_the_record_later;
    "3.13.3": "without event log it is software error 0x1a, and lost"
        => the_record_of_a_fault_without_a_page_for_it_goes_to_the_software_error_register;
    "5.1, 5.2": "configurations that cannot be enabled are refused"
        => configurations_that_the_kernel_would_refuse_are_refused;
    "5.3": "ENQCMD is retried from the threshold on"
        => enqcmd_is_retried_from_the_threshold_on;
    "5.3": "a full dedicated queue drops the descriptor and reports 0x53"
        => a_full_dedicated_queue_drops_and_reports_0x53_once;
    "5.3": "the wrong kind of write, a disabled queue, a halted device: Retry or nothing"
        => the_wrong_instruction_for_a_queue_goes_nowhere, disabled_halted_and_reset_queues_all_answer_retry;
    "5.4": "operations outside the table are 0x10"
        => every_operation_of_the_table_is_there_and_no_other;
    "5.4": "Batch and Drain within a batch are 0x10"
        => batch_and_drain_are_no_operations_within_a_batch;
    "5.4": "a misaligned record address is software error 0x1b; nothing is written"
        => a_record_needs_its_address_to_be_valid;
    "5.4": "every descriptor ends with a record or a software error"
        => any_descriptor_ends_in_one_report, any_addresses_and_any_content_end_in_one_report;
    "table 5-3": "flags allowed per operation; others are 0x11 and are named in the record"
        => flags_are_those_of_table_5_3;
    "table 5-3": "reserved bytes per operation are 0x12"
        => reserved_bytes_are_those_of_table_5_3;
    "table 5-4": "conditional fields: record address, interrupt handle, CRC seed and its address"
        => a_record_needs_its_address_to_be_valid, reserved_bytes_are_those_of_table_5_3, crc_is_crc32c_and_continues_from_a_seed;
    "table 5-5": "operations with a result require a record; Drain requires a record or an interrupt"
        => operations_with_a_result_require_a_record, a_drain_needs_a_record_or_an_interrupt;
    "5.7": "halt: everything in flight is lost, submissions return retry"
        => a_halt_in_mid_flight_leaves_no_record_behind, disabled_halted_and_reset_queues_all_answer_retry;
    "table 5-6, 0x03": "page fault without Block On Fault, read and write, on this process's real page tables"
        => an_untouched_page_faults_and_a_page_request_maps_it, the_shared_zero_page_can_be_read_and_not_written, pages_without_permission_fault_and_cannot_be_brought, unmapped_addresses_fault, pages_beyond_the_end_of_a_file_fault, a_private_page_of_a_file_is_copied_on_write_only_after_a_request, a_page_shared_with_a_child_is_copied_on_write, memory_unmapped_in_flight_is_a_fault_never_a_signal;
    "table 5-6, 0x04": "an invalid response to a page request, or too many requests for one page"
        => block_on_fault_that_cannot_be_resolved_is_an_invalid_response, missing_pages_of_userfaultfd_memory_are_never_served_to_a_device, endless_page_requests_for_one_page_are_abandoned;
    "table 5-6, 0x05": "a member without success; 0x02 is none"
        => a_false_predicate_makes_a_batch_05, without_a_fence_the_others_run_though_one_has_failed;
    "table 5-6, 0x06": "a descriptor list that faults; what was read is executed and counted"
        => a_list_that_faults_is_06_and_can_be_continued;
    "table 5-6, 0x07, 0x08": "delta offsets that do not ascend or are beyond the transfer"
        => apply_delta_refuses_offsets_that_do_not_ascend_or_are_too_large;
    "table 5-6, 0x13": "transfer size 0, or above the queue's largest"
        => sizes_are_limited_by_the_queue, deltas_are_limited_in_size_and_alignment;
    "table 5-6, 0x14, 0x18": "descriptor count and alignment of the list"
        => the_descriptor_count_is_limited;
    "table 5-6, 0x15, 0x1c": "delta record sizes and alignments"
        => deltas_are_limited_in_size_and_alignment;
    "table 5-6, 0x16": "overlapping buffers"
        => memory_move_of_overlapping_buffers_is_an_error_without_the_capability, deltas_are_limited_in_size_and_alignment, dualcast_writes_both_or_neither_byte, copy_crc_copies_and_reports_a_partial_crc_at_a_fault;
    "table 5-6, 0x17": "dualcast destinations that differ in bits 11:0"
        => dualcast_writes_both_or_neither_byte;
    "8.1.1": "PASID and Priv: a fault of ENQCMD, ignored by dedicated queues, filled in by the kernel's write"
        => enqcmd_with_a_pasid_in_its_source_faults, a_dedicated_queue_ignores_pasid_and_priv, write_follows_the_kernels_rules;
    "table 8-3, bit 3": "without Request Completion Record only errors are reported"
        => a_noop_completes_with_a_record_only_if_asked, without_request_record_errors_are_still_reported;
    "8.1, 8.2": "offsets, sizes and numbers are those of the kernel's header"
        => the_table_equals_the_kernels_header;
    "8.2.1": "the status is visible last, after the data and the rest of the record"
        => a_records_first_byte_is_written_last_and_after_the_data, when_the_status_is_seen_the_rest_of_the_record_is_there;
    "8.2.3": "Fault Info is of version 2"
        => fault_info_is_of_version_2;
    "8.2.4": "Bytes Completed: what was done before the fault, 0 on success"
        => memory_move_stops_at_a_page_fault_and_can_be_resumed, memory_move_reports_the_fault_that_comes_first, moves_resume_to_the_end;
    "8.3.1": "No-op" => a_noop_completes_with_a_record_only_if_asked;
    "8.3.2": "Batch: success if all members are; Descriptors Completed counts those processed"
        => a_batch_is_a_success_if_all_members_are, a_fence_abandons_itself_and_all_behind_it;
    "8.3.2": "a resolved fault on a member's record may make the batch 0x05"
        => a_members_record_that_needed_a_page_request_may_make_the_batch_05;
    "8.3.2": "Batch Error of a continued batch (version 2)" => a_continued_batch_remembers_its_error;
    "8.3.3": "Drain" => a_drain_completes_after_everything_that_was_before_it, a_drain_needs_a_record_or_an_interrupt;
    "8.3.4": "Memory Move, overlapping copies, both directions of resumption"
        => memory_move_copies_any_size_and_alignment, memory_move_of_overlapping_buffers_is_as_if_by_way_of_a_copy, a_reversed_move_resumes_with_the_same_addresses_and_a_smaller_size, moves_resume_to_the_end;
    "8.3.5": "Fill" => fill_repeats_eight_bytes_and_stops_at_a_fault;
    "8.3.6": "Compare: first difference; a difference wins over a fault"
        => compare_finds_the_first_difference, compare_reports_a_difference_rather_than_a_fault_behind_it, compares_find_the_first_difference_or_the_first_fault;
    "table 8-17": "Check Result" => check_result_compares_with_bit_0_of_the_expected_result;
    "8.3.7": "Compare Pattern: any size; at most the first difference"
        => compare_pattern_takes_any_size, compare_pattern_reports_at_most_the_first_difference, compare_pattern_is_never_beyond_the_first_difference;
    "8.3.8": "Create Delta Record: contents, overflow, faults, the mask of expected results"
        => create_delta_has_source_2s_words_with_offsets_in_words, create_delta_that_overflows_reports_how_far_it_came, create_delta_at_a_fault_loses_no_difference, create_delta_checks_its_result_against_a_mask, deltas_carry_every_difference;
    "8.3.9": "Apply Delta Record" => apply_delta_writes_the_words, apply_delta_counts_bytes_of_the_record_at_a_fault, deltas_carry_every_difference;
    "8.3.10": "Memory Copy with Dualcast" => dualcast_writes_both_or_neither_byte;
    "8.3.12, appendix A": "CRC Generation: CRC-32C, seeds, bypass flags, partial values"
        => crc_is_crc32c_and_continues_from_a_seed, crc_without_inversion_and_reflection, crcs_resume_with_the_partial_value;
    "8.3.13": "Copy with CRC Generation" => copy_crc_copies_and_reports_a_partial_crc_at_a_fault, crcs_resume_with_the_partial_value;
    "8.3.26": "Cache flush" => cache_flush_translates_its_range;
    "9.2.24": "priorities share by their ratio and starve no queue; engines serve their group"
        => priorities_share_by_their_ratio_and_starve_no_queue, engines_serve_only_their_group;
    "kernel, cdev": "rules of write(2)" => write_follows_the_kernels_rules;
    "SDM, ENQCMD": "operands, alignment, flags, registers"
        => a_real_enqcmd_reaches_the_model_and_zf_is_retry, a_trapped_instruction_leaves_flags_and_registers_as_the_cpu_does, other_illegal_instructions_keep_their_signal;
    "SDM, MOVDIR64B": "operands and forms of address"
        => a_real_movdir64b_reaches_a_dedicated_queue_with_other_forms_of_address, every_form_of_address;
    "IAA 3.2": "the AECS has two halves, exchanged by the toggle"
        => a_job_of_several_compress_descriptors_goes_on_in_the_aecs, an_overflowing_output_is_continued_through_the_aecs;
    "IAA 3.3": "distances beyond 4 KiB are rejected" => decompress_rejects_distances_beyond_the_window_or_before_the_start;
    "IAA 3.3.1": "verification with suppressed output" => what_compress_writes_decompress_reads;
    "IAA 3.4": "Compress: standard deflate with the codes of the AECS, window of 4 KiB"
        => compress_writes_standard_deflate_with_the_codes_of_the_aecs, compress_keeps_to_the_window, a_code_of_length_0_is_an_error;
    "IAA 3.4.1": "statistics" => statistics_count_the_tokens;
    "IAA 3.4.2, table 4-8": "compress output that does not fit is 0x0a with error 0x19"
        => compress_output_that_does_not_fit_is_not_recoverable;
    "IAA 3.6": "CRC and XOR of the uncompressed data" => decompress_reads_dynamic_fixed_and_stored_blocks;
    "IAA 3.10.1": "Decompress: all kinds of blocks; output overflow 0x0b is resumable; jobs of several buffers"
        => decompress_reads_dynamic_fixed_and_stored_blocks, an_overflowing_output_is_continued_through_the_aecs, a_stream_in_several_buffers_is_one_job;
    "IAA 3.10.3, table 3-7": "CRC64 of any polynomial" => crc64_is_any_crc;
    "IAA 4.1, 4.2": "descriptor checks; records aligned to 64" => descriptors_are_checked;
    "IAA table 4-8": "error codes of broken streams" => decompress_names_what_is_wrong_with_a_stream;
    "IAA table 6-11": "End Processing" => compress_ends_a_stream_in_three_ways;
    "IAA 7.1": "no partial completion but of overflow; no batch" => faults_are_not_partly_done, descriptors_are_checked;
}

/// Returns the text of the document.
pub fn document() -> String {
    let mut text = "# Conformance of the software model\n\n\
        Written from `lab/idxd-model/src/table/conformance.rs`; `cargo test -p sterna-idxd-model conformance` holds both\n\
        together (`STERNA_WRITE_DOCS=1` writes this file anew). Sections are those of Intel's DSA specification 341204-006US\n\
        or, where it says so, of the IAA specification revision 2.1.\n\n\
        **What this does not show: nothing here has run on hardware.** The model implements the specifications as we read\n\
        them. Not modelled: interrupts, DIF, operations of DSA versions 2 and 3, inter-domain operations, traffic classes,\n\
        bandwidth limits; of IAA filters, ciphers, indexing, dictionaries, header generation and big-endian streams.\n\n\
        | section | requires | tests |\n|---|---|---|\n"
        .to_owned();
    for row in ROWS {
        let tests: Vec<String> = row.tests.iter().map(|test| format!("`{test}`")).collect();
        writeln!(text, "| {} | {} | {} |", row.section, row.requires, tests.join(", "))
            .expect("strings take everything");
    }
    text
}
