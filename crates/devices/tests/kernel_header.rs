//! The kernel's own header has the last word on numbers: a C program over `<linux/vfio.h>` prints them, and they must be this
//! crate's. Names that an older header lacks are listed as not compared.

use std::collections::HashSet;
use std::mem::offset_of;
use std::process::Command;

use sterna_devices::vfio::{State, abi};

/// A C expression and what this crate has for it.
fn expectations() -> Vec<(String, u64)> {
    let mut all: Vec<(String, u64)> = Vec::new();
    for (name, value) in [
        ("VFIO_SET_IOMMU", abi::SET_IOMMU),
        ("VFIO_GROUP_SET_CONTAINER", abi::GROUP_SET_CONTAINER),
        ("VFIO_GROUP_GET_DEVICE_FD", abi::GROUP_GET_DEVICE_FD),
        ("VFIO_DEVICE_RESET", abi::DEVICE_RESET),
        ("VFIO_DEVICE_FEATURE", abi::DEVICE_FEATURE),
        ("VFIO_DEVICE_BIND_IOMMUFD", abi::DEVICE_BIND_IOMMUFD),
        ("VFIO_MIG_GET_PRECOPY_INFO", abi::MIG_GET_PRECOPY_INFO),
        ("VFIO_TYPE1v2_IOMMU", abi::TYPE1V2_IOMMU),
        ("VFIO_DEVICE_FEATURE_GET", abi::FEATURE_GET),
        ("VFIO_DEVICE_FEATURE_SET", abi::FEATURE_SET),
        ("VFIO_DEVICE_FEATURE_MIGRATION", abi::FEATURE_MIGRATION),
        ("VFIO_DEVICE_FEATURE_MIG_DEVICE_STATE", abi::FEATURE_MIG_DEVICE_STATE),
        ("VFIO_DEVICE_FEATURE_DMA_LOGGING_START", abi::FEATURE_DMA_LOGGING_START),
        ("VFIO_DEVICE_FEATURE_DMA_LOGGING_STOP", abi::FEATURE_DMA_LOGGING_STOP),
        ("VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT", abi::FEATURE_DMA_LOGGING_REPORT),
        ("VFIO_DEVICE_FEATURE_MIG_DATA_SIZE", abi::FEATURE_MIG_DATA_SIZE),
    ] {
        all.push((name.to_owned(), value.into()));
    }
    for (name, value) in [
        ("VFIO_MIGRATION_STOP_COPY", abi::MIGRATION_STOP_COPY),
        ("VFIO_MIGRATION_P2P", abi::MIGRATION_P2P),
        ("VFIO_MIGRATION_PRE_COPY", abi::MIGRATION_PRE_COPY),
    ] {
        all.push((name.to_owned(), value));
    }
    for state in State::ALL {
        all.push((format!("VFIO_DEVICE_STATE_{state}"), state.number().into()));
    }

    macro_rules! structure {
        ($c:literal, $rust:ty, $($theirs:literal = $ours:ident),+) => {
            all.push((format!("sizeof(struct {})", $c), size_of::<$rust>() as u64));
            $(
                all.push((format!("offsetof(struct {}, {})", $c, $theirs), offset_of!($rust, $ours) as u64));
            )+
        };
    }
    structure!("vfio_device_feature_migration", abi::Migration, "flags" = flags);
    structure!("vfio_device_feature_mig_state", abi::MigState, "device_state" = device_state, "data_fd" = data_fd);
    structure!("vfio_device_feature_mig_data_size", abi::MigDataSize, "stop_copy_length" = stop_copy_length);
    structure!(
        "vfio_precopy_info",
        abi::PrecopyInfo,
        "argsz" = argsz,
        "flags" = flags,
        "initial_bytes" = initial_bytes,
        "dirty_bytes" = dirty_bytes
    );
    structure!(
        "vfio_device_feature_dma_logging_control",
        abi::DmaLoggingControl,
        "page_size" = page_size,
        "num_ranges" = num_ranges,
        "__reserved" = reserved,
        "ranges" = ranges
    );
    structure!("vfio_device_feature_dma_logging_range", abi::DmaLoggingRange, "iova" = iova, "length" = length);
    structure!(
        "vfio_device_feature_dma_logging_report",
        abi::DmaLoggingReport,
        "iova" = iova,
        "length" = length,
        "page_size" = page_size,
        "bitmap" = bitmap
    );
    // Not its size: newer headers have a token at its end, and the kernel takes the structure without.
    for (field, at) in [
        ("argsz", offset_of!(abi::BindIommufd, argsz)),
        ("flags", offset_of!(abi::BindIommufd, flags)),
        ("iommufd", offset_of!(abi::BindIommufd, iommufd)),
        ("out_devid", offset_of!(abi::BindIommufd, out_devid)),
    ] {
        all.push((format!("offsetof(struct vfio_device_bind_iommufd, {field})"), at as u64));
    }
    // The data of every feature begins where the header's flexible array does.
    structure!("vfio_device_feature", abi::Feature<()>, "argsz" = argsz, "flags" = flags, "data" = data);
    for at in [
        offset_of!(abi::Feature<abi::Migration>, data),
        offset_of!(abi::Feature<abi::MigState>, data),
        offset_of!(abi::Feature<abi::MigDataSize>, data),
        offset_of!(abi::Feature<abi::DmaLoggingControl>, data),
        offset_of!(abi::Feature<abi::DmaLoggingReport>, data),
    ] {
        all.push(("offsetof(struct vfio_device_feature, data)".to_owned(), at as u64));
    }
    all
}

const PREAMBLE: &str = "#include <stddef.h>\n#include <stdio.h>\n#include <linux/vfio.h>\n";

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
        Some(Err(complaint)) => return println!("skipped: no usable <linux/vfio.h>:\n{complaint}"),
        Some(Ok(_)) => {}
    }
    let expected = expectations();
    let line = |index: usize, expression: &str| {
        format!("#line {} \"row\"\n    printf(\"{index} %llu\\n\", (unsigned long long)({expression}));\n", index + 1)
    };
    // Each row has its own line number, so complaints about names that this header lacks say which rows to leave out.
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
    assert!(compared >= 40, "hardly anything was compared: {compared}");
}
