//! The model's table against the kernel's own header: a C program prints what `linux/idxd.h` says, and both must agree. The
//! driver's own test compares its table with the same header, so the two tables cannot share an error.

use std::collections::HashMap;
use std::fs;
use std::process::Command;

use sterna_idxd_model::table::{dsa, iaa, status};

/// Names in the header's words beside the model's.
fn expected() -> Vec<(String, u64)> {
    let mut all: Vec<(String, u64)> = Vec::new();
    let mut say = |name: &str, value: u64| all.push((name.to_owned(), value));
    say("sizeof(struct dsa_hw_desc)", dsa::DESCRIPTOR as u64);
    say("sizeof(struct dsa_completion_record)", dsa::record::BYTES as u64);
    say("sizeof(struct iax_hw_desc)", 64);
    say("sizeof(struct iax_completion_record)", iaa::record::BYTES as u64);
    let record = dsa::record::STATUS;
    for (structure, field, row) in [
        ("dsa_hw_desc", "completion_addr", dsa::RECORD),
        ("dsa_hw_desc", "src_addr", dsa::SOURCE),
        ("dsa_hw_desc", "pattern", dsa::SOURCE),
        ("dsa_hw_desc", "desc_list_addr", dsa::SOURCE),
        ("dsa_hw_desc", "dst_addr", dsa::DESTINATION),
        ("dsa_hw_desc", "src2_addr", dsa::DESTINATION),
        ("dsa_hw_desc", "comp_pattern", dsa::DESTINATION),
        ("dsa_hw_desc", "xfer_size", dsa::SIZE),
        ("dsa_hw_desc", "desc_count", dsa::SIZE),
        ("dsa_hw_desc", "int_handle", dsa::INTERRUPT),
        ("dsa_hw_desc", "expected_res", dsa::EXPECTED_RESULT),
        ("dsa_hw_desc", "delta_addr", dsa::DELTA_RECORD),
        ("dsa_hw_desc", "max_delta_size", dsa::DELTA_LIMIT),
        ("dsa_hw_desc", "expected_res_mask", dsa::EXPECTED_MASK),
        ("dsa_hw_desc", "delta_rec_size", dsa::DELTA_SIZE),
        ("dsa_hw_desc", "dest2", dsa::DESTINATION2),
        ("dsa_hw_desc", "crc_seed", dsa::CRC_SEED),
        ("dsa_hw_desc", "seed_addr", dsa::CRC_SEED_ADDRESS),
        ("dsa_completion_record", "status", record),
        ("dsa_completion_record", "result", dsa::record::RESULT),
        ("dsa_completion_record", "bytes_completed", dsa::record::COMPLETED),
        ("dsa_completion_record", "fault_addr", dsa::record::FAULT_ADDRESS),
        ("dsa_completion_record", "delta_rec_size", dsa::record::DELTA_SIZE),
        ("iax_hw_desc", "completion_addr", dsa::RECORD),
        ("iax_hw_desc", "src1_addr", iaa::SOURCE1),
        ("iax_hw_desc", "dst_addr", iaa::DESTINATION),
        ("iax_hw_desc", "src1_size", iaa::SOURCE1_SIZE),
        ("iax_hw_desc", "int_handle", dsa::INTERRUPT),
        ("iax_hw_desc", "compr_flags", iaa::OPERATION_FLAGS),
        ("iax_hw_desc", "decompr_flags", iaa::OPERATION_FLAGS),
        ("iax_hw_desc", "src2_addr", iaa::SOURCE2),
        ("iax_hw_desc", "max_dst_size", iaa::DESTINATION_SIZE),
        ("iax_hw_desc", "src2_size", iaa::SOURCE2_SIZE),
        ("iax_completion_record", "status", record),
        ("iax_completion_record", "error_code", iaa::record::ERROR),
        ("iax_completion_record", "bytes_completed", iaa::record::COMPLETED),
        ("iax_completion_record", "fault_addr", iaa::record::FAULT_ADDRESS),
        ("iax_completion_record", "invalid_flags", iaa::record::INVALID_FLAGS),
        ("iax_completion_record", "output_size", iaa::record::OUTPUT_SIZE),
        ("iax_completion_record", "output_bits", iaa::record::OUTPUT_BITS),
        ("iax_completion_record", "xor_csum", iaa::record::XOR),
        ("iax_completion_record", "crc", iaa::record::CRC),
    ] {
        say(&format!("offsetof(struct {structure}, {field})"), row.offset as u64);
        say(&format!("sizeof(((struct {structure} *)0)->{field})"), row.bytes as u64);
    }
    // A union with the 64-bit CRC of later versions.
    say("offsetof(struct dsa_completion_record, crc_val)", dsa::record::CRC.offset as u64);
    for (name, mask) in [
        ("FENCE", dsa::FENCE),
        ("BOF", dsa::BLOCK_ON_FAULT),
        ("CRAV", dsa::RECORD_VALID),
        ("RCR", dsa::REQUEST_RECORD),
        ("RCI", dsa::REQUEST_INTERRUPT),
        ("CR", dsa::CHECK_RESULT),
        ("CC", dsa::CACHE_CONTROL_1),
        ("ADDR1_TCS", dsa::ADDRESS_1_CLASS),
        ("ADDR2_TCS", dsa::ADDRESS_2_CLASS),
        ("ADDR3_TCS", dsa::ADDRESS_3_CLASS),
        ("CR_TCS", dsa::RECORD_CLASS),
        ("STORD", dsa::STRICT_ORDERING),
        ("DRDBK", dsa::CACHE_CONTROL_2),
        ("RD_SRC2_AECS", iaa::READ_AECS),
        ("WR_SRC2_AECS_COMP", iaa::WRITE_AECS),
        ("WR_SRC2_AECS_OVFL", iaa::WRITE_ON_OVERFLOW),
        ("CRC_RFC3720", iaa::CRC_SELECT),
    ] {
        say(&format!("IDXD_OP_FLAG_{name}"), u64::from(mask));
    }
    for (name, code) in [
        ("NOOP", dsa::code::NOOP),
        ("BATCH", dsa::code::BATCH),
        ("DRAIN", dsa::code::DRAIN),
        ("MEMMOVE", dsa::code::MOVE),
        ("MEMFILL", dsa::code::FILL),
        ("COMPARE", dsa::code::COMPARE),
        ("COMPVAL", dsa::code::COMPARE_PATTERN),
        ("CR_DELTA", dsa::code::CREATE_DELTA),
        ("AP_DELTA", dsa::code::APPLY_DELTA),
        ("DUALCAST", dsa::code::DUALCAST),
        ("CRCGEN", dsa::code::CRC),
        ("COPY_CRC", dsa::code::COPY_CRC),
        ("CFLUSH", dsa::code::CACHE_FLUSH),
    ] {
        say(&format!("DSA_OPCODE_{name}"), u64::from(code));
    }
    for (name, code) in [
        ("NOOP", iaa::code::NOOP),
        ("DRAIN", iaa::code::DRAIN),
        ("DECOMPRESS", iaa::code::DECOMPRESS),
        ("COMPRESS", iaa::code::COMPRESS),
        ("CRC64", iaa::code::CRC64),
    ] {
        say(&format!("IAX_OPCODE_{name}"), u64::from(code));
    }
    for (name, code) in [
        ("SUCCESS", status::SUCCESS),
        ("SUCCESS_PRED", status::FALSE_PREDICATE),
        ("PAGE_FAULT_NOBOF", status::PAGE_FAULT),
        ("PAGE_FAULT_IR", status::INVALID_RESPONSE),
        ("BATCH_FAIL", status::BATCH_FAIL),
        ("BATCH_PAGE_FAULT", status::BATCH_FAULT),
        ("DR_OFFSET_NOINC", status::DELTA_ORDER),
        ("DR_OFFSET_ERANGE", status::DELTA_RANGE),
        ("BAD_OPCODE", status::BAD_OPERATION),
        ("INVALID_FLAGS", status::INVALID_FLAGS),
        ("NOZERO_RESERVE", status::RESERVED),
        ("XFER_ERANGE", status::BAD_SIZE),
        ("DESC_CNT_ERANGE", status::BAD_COUNT),
        ("DR_ERANGE", status::BAD_VALUE),
        ("OVERLAP_BUFFERS", status::OVERLAP),
        ("DCAST_ERR", status::DUALCAST),
        ("DESCLIST_ALIGN", status::LIST_ALIGNMENT),
        ("INT_HANDLE_INVAL", status::BAD_HANDLE),
        ("CRA_XLAT", status::RECORD_FAULT),
        ("CRA_ALIGN", status::RECORD_ALIGNMENT),
        ("ADDR_ALIGN", status::ALIGNMENT),
        ("PRIV_BAD", status::PRIVILEGE),
        ("HW_ERR1", status::HARDWARE_READ),
        ("HW_ERR_DRB", status::HARDWARE_WRITE),
        ("STATUS_WRITE", status::WRITE),
    ] {
        say(&format!("DSA_COMP_{name}"), u64::from(code));
    }
    for (name, code) in [
        ("ANALYTICS_ERROR", status::ANALYTICS),
        ("OUTBUF_OVERFLOW", status::OUTPUT_OVERFLOW),
        ("INVALID_SIZE", status::BAD_SIZE),
        ("INVALID_COMP_FLAG", status::IAA_COMPRESSION_FLAGS),
    ] {
        say(&format!("IAX_COMP_{name}"), u64::from(code));
    }
    all
}

/// Bit fields have no offset: the program fills one with ones and prints the bytes.
const BIT_FIELDS: &str = r#"
#define BYTES(type, field, value) do { union { struct type it; unsigned char bytes[64]; } all; \
    memset(&all, 0, sizeof all); all.it.field = value; printf("bytes(%s.%s)\t", #type, #field); \
    for (int at = 0; at < 8; at++) printf("%02x", all.bytes[at]); printf("\n"); } while (0)
    BYTES(dsa_hw_desc, pasid, 0xfffff);
    BYTES(dsa_hw_desc, priv, 1);
    BYTES(dsa_hw_desc, flags, 0x123456);
    BYTES(dsa_hw_desc, opcode, 0x78);
    BYTES(iax_hw_desc, flags, 0x123456);
    BYTES(iax_hw_desc, opcode, 0x78);
"#;

#[test]
fn the_table_equals_the_kernels_header() {
    if !fs::exists("/usr/include/linux/idxd.h").unwrap() {
        eprintln!("skipped: linux/idxd.h is not installed");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut source = "#include <linux/idxd.h>\n#include <stddef.h>\n#include <stdio.h>\n#include <string.h>\n\
                      int main(void) {\n"
        .to_owned();
    for (name, _) in expected() {
        source += &format!("    printf(\"{name}\\t%llu\\n\", (unsigned long long)({name}));\n");
    }
    source += BIT_FIELDS;
    source += "    return 0;\n}\n";
    let (file, program) = (directory.path().join("abi.c"), directory.path().join("abi"));
    fs::write(&file, source).unwrap();
    match Command::new("cc").arg("-o").arg(&program).arg(&file).output() {
        Err(error) => {
            eprintln!("skipped: there is no C compiler: {error}");
            return;
        }
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
    }
    let output = String::from_utf8(Command::new(&program).output().unwrap().stdout).unwrap();
    let said: HashMap<&str, &str> = output.lines().filter_map(|line| line.split_once('\t')).collect();
    for (name, value) in expected() {
        assert_eq!(said[name.as_str()], value.to_string(), "{name}");
    }
    for (structure, field, row, value) in [
        ("dsa_hw_desc", "pasid", dsa::TRUSTED, 0xf_ffff),
        ("dsa_hw_desc", "priv", dsa::TRUSTED, 0x8000_0000),
        ("dsa_hw_desc", "flags", dsa::FLAGS, 0x12_3456),
        ("dsa_hw_desc", "opcode", dsa::OPERATION, 0x78),
        ("iax_hw_desc", "flags", dsa::FLAGS, 0x12_3456),
        ("iax_hw_desc", "opcode", dsa::OPERATION, 0x78),
    ] {
        let mut bytes = [0; 64];
        row.set(&mut bytes, value);
        let hex: String = bytes[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(said[format!("bytes({structure}.{field})").as_str()], hex, "{structure}.{field}");
    }
}
