//! Compares this crate's numbers with the kernel's header: a C program with `<linux/idxd.h>` prints offsets, operation
//! codes, flags and status codes. Names that an older header lacks are listed as not compared.

use std::collections::HashSet;
use std::process::Command;

use sterna_idxd::flags::{Operation, flag};
use sterna_idxd::{Status, descriptor_offset, iaa, record_offset};

/// Returns C expressions and this crate's values of them.
fn expectations() -> Vec<(String, u64)> {
    let mut all: Vec<(String, u64)> = Vec::new();
    let mut add = |expression: &str, value: u64| all.push((expression.to_owned(), value));

    add("sizeof(struct dsa_hw_desc)", 64);
    add("sizeof(struct iax_hw_desc)", 64);
    add("sizeof(struct dsa_completion_record)", 32);
    add("sizeof(struct iax_completion_record)", 64);

    use descriptor_offset as d;
    for (field, at) in [
        ("completion_addr", d::RECORD),
        ("src_addr", d::SOURCE),
        ("desc_list_addr", d::SOURCE),
        ("dst_addr", d::DESTINATION),
        ("src2_addr", d::DESTINATION),
        ("comp_pattern", d::DESTINATION),
        ("xfer_size", d::SIZE),
        ("desc_count", d::SIZE),
        ("int_handle", d::INTERRUPT),
        ("expected_res", d::EXPECTED_RESULT),
        ("delta_addr", d::DELTA_ADDRESS),
        ("max_delta_size", d::DELTA_CAPACITY),
        ("expected_res_mask", d::EXPECTED_MASK),
        ("delta_rec_size", d::DELTA_SIZE),
        ("crc_seed", d::CRC_SEED),
    ] {
        add(&format!("offsetof(struct dsa_hw_desc, {field})"), at as u64);
    }
    use record_offset as r;
    for (field, at) in [
        ("status", r::STATUS),
        ("result", r::RESULT),
        ("bytes_completed", r::BYTES_COMPLETED),
        ("fault_addr", r::FAULT_ADDRESS),
        ("delta_rec_size", r::DETAIL),
        ("crc_val", r::DETAIL),
    ] {
        add(&format!("offsetof(struct dsa_completion_record, {field})"), at as u64);
    }
    // Flags and operation code are bit fields: compared are the first eight bytes of a structure with one of them set.
    add("first_word((struct dsa_hw_desc){ .flags = 0xffffff })", 0x00ff_ffff << (8 * d::FLAGS));
    add("first_word((struct dsa_hw_desc){ .opcode = 0xff })", 0xff << (8 * d::OPERATION));

    for (name, operation) in [
        ("NOOP", Operation::Noop),
        ("BATCH", Operation::Batch),
        ("DRAIN", Operation::Drain),
        ("MEMMOVE", Operation::Memmove),
        ("COMPARE", Operation::Compare),
        ("COMPVAL", Operation::ComparePattern),
        ("CR_DELTA", Operation::CreateDelta),
        ("AP_DELTA", Operation::ApplyDelta),
        ("CRCGEN", Operation::Crc),
        ("COPY_CRC", Operation::CopyCrc),
    ] {
        add(&format!("DSA_OPCODE_{name}"), operation as u64);
    }
    for (name, operation) in [
        ("NOOP", iaa::Operation::Noop),
        ("DRAIN", iaa::Operation::Drain),
        ("DECOMPRESS", iaa::Operation::Decompress),
        ("COMPRESS", iaa::Operation::Compress),
        ("CRC64", iaa::Operation::Crc64),
    ] {
        add(&format!("IAX_OPCODE_{name}"), operation as u64);
    }

    for (name, bit) in [
        ("FENCE", flag::FENCE),
        ("BOF", flag::BLOCK_ON_FAULT),
        ("CRAV", flag::RECORD_ADDRESS_VALID),
        ("RCR", flag::REQUEST_RECORD),
        ("RCI", flag::REQUEST_INTERRUPT),
        ("CR", flag::CHECK_RESULT),
        ("CC", flag::CACHE_CONTROL_1),
        ("ADDR1_TCS", flag::ADDRESS_1_TC_B),
        ("ADDR2_TCS", flag::ADDRESS_2_TC_B),
        ("ADDR3_TCS", flag::ADDRESS_3_TC_B),
        ("CR_TCS", flag::RECORD_TC_B),
        ("STORD", flag::STRICT_ORDERING),
        ("DRDBK", flag::CACHE_CONTROL_2),
        ("RD_SRC2_AECS", iaa::flag::READ_AECS),
        ("WR_SRC2_AECS_COMP", iaa::flag::WRITE_AECS),
        ("WR_SRC2_AECS_OVFL", iaa::flag::WRITE_AECS_ON_OVERFLOW),
        ("CRC_RFC3720", iaa::flag::CRC32C),
    ] {
        add(&format!("IDXD_OP_FLAG_{name}"), bit.into());
    }

    for (name, status) in [
        ("SUCCESS", Status::Success),
        ("SUCCESS_PRED", Status::FalsePredicate),
        ("PAGE_FAULT_NOBOF", Status::PageFault),
        ("PAGE_FAULT_IR", Status::PageRequestFailed),
        ("BATCH_FAIL", Status::BatchMemberFailed),
        ("BATCH_PAGE_FAULT", Status::BatchListFault),
        ("DR_OFFSET_NOINC", Status::DeltaOffsetOrder),
        ("DR_OFFSET_ERANGE", Status::DeltaOffsetRange),
        ("DIF_ERR", Status::DifError),
        ("BAD_OPCODE", Status::BadOperation),
        ("INVALID_FLAGS", Status::BadFlags),
        ("NOZERO_RESERVE", Status::ReservedNotZero),
        ("XFER_ERANGE", Status::BadSize),
        ("DESC_CNT_ERANGE", Status::BadCount),
        ("DR_ERANGE", Status::BadValue),
        ("OVERLAP_BUFFERS", Status::Overlap),
        ("DCAST_ERR", Status::DualcastBits),
        ("DESCLIST_ALIGN", Status::ListAlignment),
        ("INT_HANDLE_INVAL", Status::BadInterruptHandle),
        ("CRA_XLAT", Status::RecordFault),
        ("CRA_ALIGN", Status::RecordAlignment),
        ("ADDR_ALIGN", Status::Alignment),
        ("PRIV_BAD", Status::Privilege),
        ("TRAFFIC_CLASS_CONF", Status::TrafficClass),
        ("PFAULT_RDBA", Status::ReadbackFault),
        ("HW_ERR1", Status::HardwareError),
        ("HW_ERR_DRB", Status::WriteError),
        ("TRANSLATION_FAIL", Status::TranslationError),
        ("DRAIN_EVL", Status::DrainRecordFault),
        ("BATCH_EVL_ERR", Status::BatchRecordFault),
    ] {
        add(&format!("DSA_COMP_{name}"), status.code().into());
    }
    for (name, status) in [
        ("SUCCESS", Status::Success),
        ("PAGE_FAULT_IR", Status::PageRequestFailed),
        ("ANALYTICS_ERROR", Status::AnalyticsError),
        ("OUTBUF_OVERFLOW", Status::OutputOverflow),
        ("BAD_OPCODE", Status::BadOperation),
        ("INVALID_FLAGS", Status::BadFlags),
        ("NOZERO_RESERVE", Status::ReservedNotZero),
        ("INVALID_SIZE", Status::BadSize),
        ("OVERLAP_BUFFERS", Status::Overlap),
        ("INT_HANDLE_INVAL", Status::BadInterruptHandle),
        ("CRA_XLAT", Status::RecordFault),
        ("CRA_ALIGN", Status::RecordAlignment),
        ("ADDR_ALIGN", Status::Alignment),
        ("PRIV_BAD", Status::Privilege),
        ("TRAFFIC_CLASS_CONF", Status::TrafficClass),
        ("PFAULT_RDBA", Status::ReadbackFault),
        ("HW_ERR1", Status::HardwareError),
        ("HW_ERR_DRB", Status::WriteError),
        ("TRANSLATION_FAIL", Status::TranslationError),
        ("PRS_TIMEOUT", Status::PageRequestTimeout),
        ("WATCHDOG", Status::Watchdog),
        ("INVALID_COMP_FLAG", Status::BadOperationFlags),
        ("INVALID_FILTER_FLAG", Status::BadFilterFlags),
        ("INVALID_INPUT_SIZE", Status::BadInputSize),
        ("INVALID_NUM_ELEMS", Status::BadElementCount),
        ("INVALID_SRC1_WIDTH", Status::BadSourceWidth),
        ("INVALID_INVERT_OUT", Status::BadInvertOutput),
    ] {
        add(&format!("IAX_COMP_{name}"), status.code().into());
    }
    add("DSA_COMP_STATUS_WRITE", 0x80);

    // IAA descriptors and records, by where this crate writes and reads marked values.
    let marked = |find: u64, descriptor: iaa::Descriptor| -> u64 {
        let bytes = descriptor.as_bytes();
        (0..=56).find(|at| u64::from_le_bytes(bytes[*at..*at + 8].try_into().unwrap()) & find == find).unwrap() as u64
    };
    let mark = 0x0123_4567_89ab_cdef;
    add("offsetof(struct iax_hw_desc, src1_addr)", marked(mark, iaa::Descriptor::decompress(mark, 0, 0, 0)));
    add("offsetof(struct iax_hw_desc, dst_addr)", marked(mark, iaa::Descriptor::decompress(0, 0, mark, 0)));
    add("offsetof(struct iax_hw_desc, src2_addr)", marked(mark, iaa::Descriptor::compress(0, 0, 0, 0, mark)));
    all
}

/// Offsets in IAA structures of values of 4 bytes and less.
const IAA_OFFSETS: [(&str, usize); 10] = [
    ("offsetof(struct iax_hw_desc, src1_size)", 32),
    ("offsetof(struct iax_hw_desc, compr_flags)", 38),
    ("offsetof(struct iax_hw_desc, max_dst_size)", 48),
    ("offsetof(struct iax_hw_desc, src2_size)", 52),
    ("offsetof(struct iax_completion_record, error_code)", 1),
    ("offsetof(struct iax_completion_record, invalid_flags)", 16),
    ("offsetof(struct iax_completion_record, output_size)", 24),
    ("offsetof(struct iax_completion_record, output_bits)", 28),
    ("offsetof(struct iax_completion_record, xor_csum)", 30),
    ("offsetof(struct iax_completion_record, crc)", 32),
];

/// Checks that this crate reads and writes at those offsets, so that the table above is compared with the crate too.
#[test]
fn the_table_of_iaa_offsets_is_what_the_crate_does() {
    let descriptor = iaa::Descriptor::compress(0, 0x1111, 0, 0x2222, 0);
    let word = |at: usize| u32::from_le_bytes(descriptor.as_bytes()[at..at + 4].try_into().unwrap());
    assert_eq!((word(IAA_OFFSETS[0].1), word(IAA_OFFSETS[2].1), word(IAA_OFFSETS[3].1)), (0x1111, 0x2222, 1568));
    assert_eq!(descriptor.as_bytes()[IAA_OFFSETS[1].1], 0b0110);
    let mut record = [0_u8; 64];
    record[0] = 0x0a;
    for (value, (_, at)) in IAA_OFFSETS[4..].iter().enumerate() {
        record[*at] = value as u8 + 1;
    }
    let completion = iaa::Completion::from_bytes(&record);
    assert_eq!(completion.error, Some(iaa::AnalyticsError(1)));
    assert_eq!((completion.invalid_flags, completion.output_bytes, completion.output_bits), (2, 3, 4));
    assert_eq!((completion.xor, completion.crc), (5, 6));
}

const PREAMBLE: &str = "#include <stddef.h>\n#include <stdio.h>\n#include <string.h>\n#include <linux/idxd.h>\n\
    static inline unsigned long long first_word(struct dsa_hw_desc d) { unsigned long long w; memcpy(&w, &d, 8); return w; }\n";

/// Compiles and returns the compiler's complaints, if any. `None` if there is no compiler.
fn compile(source: &str, directory: &std::path::Path) -> Option<Result<std::path::PathBuf, String>> {
    let (input, output) = (directory.join("abi.c"), directory.join("abi"));
    std::fs::write(&input, source).unwrap();
    let run = Command::new("cc").args(["-std=gnu11", "-O0", "-fmax-errors=0", "-o"]).arg(&output).arg(&input).output();
    let run = run.ok()?;
    Some(if run.status.success() { Ok(output) } else { Err(String::from_utf8_lossy(&run.stderr).into_owned()) })
}

#[test]
fn the_kernels_header_has_the_same_numbers() {
    let directory = tempfile::tempdir().unwrap();
    match compile(&format!("{PREAMBLE}int main(void) {{ return 0; }}\n"), directory.path()) {
        None => return println!("skipped: there is no C compiler (cc)"),
        Some(Err(complaint)) => return println!("skipped: no usable <linux/idxd.h>:\n{complaint}"),
        Some(Ok(_)) => {}
    }
    let mut expected = expectations();
    expected.extend(IAA_OFFSETS.map(|(expression, at)| (expression.to_owned(), at as u64)));
    let line = |index: usize, expression: &str| {
        format!("#line {} \"row\"\n    printf(\"{index} %llu\\n\", (unsigned long long)({expression}));\n", index + 1)
    };
    // Each row has its own line number, so the compiler's errors about names that this header lacks show which rows to
    // leave out.
    let program = |left_out: &HashSet<usize>| {
        let body: String = expected
            .iter()
            .enumerate()
            .filter(|(index, _)| !left_out.contains(index))
            .map(|(index, (expression, _))| line(index, expression))
            .collect();
        format!("{PREAMBLE}int main(void) {{\n{body}    return 0;\n}}\n")
    };
    let mut missing = HashSet::new();
    let binary = loop {
        match compile(&program(&missing), directory.path()).unwrap() {
            Ok(binary) => break binary,
            Err(complaint) => {
                let before = missing.len();
                for rest in complaint.lines().filter_map(|line| line.strip_prefix("row:")) {
                    let number: Option<usize> = rest.split(':').next().and_then(|digits| digits.parse().ok());
                    if let Some(index) = number.filter(|_| rest.contains("error")).and_then(|row| row.checked_sub(1)) {
                        missing.insert(index);
                    }
                }
                assert!(missing.len() > before, "{complaint}");
            }
        }
    };
    let mut not_compared: Vec<&str> = missing.iter().map(|index| expected[*index].0.as_str()).collect();
    not_compared.sort_unstable();
    println!("not in this kernel's header, so not compared: {not_compared:?}");

    let output = String::from_utf8(Command::new(binary).output().unwrap().stdout).unwrap();
    let mut compared = 0;
    for line in output.lines() {
        let (index, value) = line.split_once(' ').unwrap();
        let (expression, ours) = &expected[index.parse::<usize>().unwrap()];
        assert_eq!(value.parse::<u64>().unwrap(), *ours, "{expression}");
        compared += 1;
    }
    assert_eq!(compared, expected.len() - missing.len());
    println!("{compared} numbers compared");
    assert!(compared > 80, "hardly anything was compared: {compared}");
}
