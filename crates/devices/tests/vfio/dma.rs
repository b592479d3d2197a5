//! DMA logging: the model compared with the kernel's core, and the dirty log that uses it.

use super::errno;
use sterna_devices::vfio::model::{Call, Config, Fault, ModelDevice};
use sterna_devices::vfio::{Device, DmaLog, DmaMapping, DmaRange, State};
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::reported::ReportedLog;
use sterna_memory::dirty::union::UnionLog;
use sterna_memory::dirty::{DirtyLog, DirtyLogError};

const PAGE: u64 = 4096;

fn pages(from: u64, count: u64) -> DmaRange {
    DmaRange { iova: from * PAGE, length: count * PAGE }
}

fn bits(words: &[u64]) -> Vec<u64> {
    (0..words.len() as u64 * 64).filter(|bit| words[(bit / 64) as usize] & (1 << (bit % 64)) != 0).collect()
}

fn set(bitmap: &PageBitmap) -> Vec<u64> {
    (0..bitmap.pages()).filter(|page| bitmap.contains(*page)).collect()
}

#[test]
fn the_model_records_writes_within_its_ranges_and_reports_them_once() {
    let device = ModelDevice::new(Config::empty(0));
    assert!(device.dma_write(pages(10, 1)));
    assert_eq!(device.dma_logging_start(PAGE, &[pages(0, 100), pages(200, 10)]).unwrap(), PAGE);
    device.dma_write(DmaRange { iova: 11 * PAGE + 4000, length: 200 });
    device.dma_write(pages(99, 110));
    let mut words = [1 << 63, 0, 0, 0];
    device.dma_logging_report(pages(10, 200), PAGE, &mut words).unwrap();
    assert_eq!(bits(&words), [1, 2, 63, 89].into_iter().chain(190..199).collect::<Vec<_>>(), "bits are only set");
    let mut words = [0; 4];
    device.dma_logging_report(pages(0, 210), PAGE, &mut words).unwrap();
    assert_eq!(bits(&words), [0; 0]);
    device.dma_logging_stop().unwrap();
    assert_eq!(errno(device.dma_logging_report(pages(0, 10), PAGE, &mut words)), libc::EINVAL);
    assert_eq!(errno(device.dma_logging_stop()), libc::EINVAL);
}

#[test]
fn the_model_refuses_what_the_kernel_refuses() {
    let device = ModelDevice::new(Config::empty(0));
    let start = |ranges: &[DmaRange]| errno(device.dma_logging_start(PAGE, ranges));
    assert_eq!(start(&[]), libc::EINVAL);
    assert_eq!(start(&[pages(0, 2), pages(1, 2)]), libc::EINVAL, "overlapping");
    assert_eq!(start(&[DmaRange { iova: 12, length: PAGE }]), libc::EINVAL, "not of whole pages");
    assert_eq!(start(&[DmaRange { iova: 0u64.wrapping_sub(PAGE), length: 2 * PAGE }]), libc::EOVERFLOW);
    let many: Vec<_> = (0..257).map(|at| pages(2 * at, 1)).collect();
    assert_eq!(start(&many), libc::E2BIG);
    device.dma_logging_start(PAGE, &many[..256]).unwrap();
    assert_eq!(start(&[pages(0, 1)]), libc::EINVAL, "started already");
    let mut words = [0; 1];
    for page_size in [0, 2048, 12288] {
        assert_eq!(errno(device.dma_logging_report(pages(0, 1), page_size, &mut words)), libc::EINVAL, "{page_size}");
    }
    let mut log = DmaLog::new(device.clone(), "gpu", &[8], vec![whole(0, 8)]).unwrap();
    assert!(log.start().is_err());
    device.dma_logging_stop().unwrap();
    log.start().unwrap();
}

fn whole(block: usize, pages: u64) -> DmaMapping {
    DmaMapping { iova: block as u64 * (1 << 40), pages, block, first_page: 0 }
}

#[test]
fn the_log_reports_the_written_pages_of_each_block_once() {
    let device = ModelDevice::new(Config::empty(0));
    // The first block is mapped in two parts, as in the address map of a machine with a hole.
    let first = DmaMapping { iova: 1 << 20, pages: 1000, block: 0, first_page: 24 };
    let second = DmaMapping { iova: 1 << 32, pages: 476, block: 0, first_page: 1024 };
    let mut log = DmaLog::new(device.clone(), "nic", &[1500, 70], vec![first, second, whole(1, 70)]).unwrap();
    let mut dirty = PageBitmap::new(1500);
    assert!(matches!(log.collect(0, &mut dirty), Err(DirtyLogError::NotStarted)));
    device.dma_write(DmaRange { iova: 1 << 20, length: 1 });
    log.start().unwrap();
    assert!(matches!(log.start(), Err(DirtyLogError::AlreadyStarted)));
    for iova in [(1 << 20) + 63 * PAGE, (1 << 20) + 64 * PAGE, (1 << 20) + 999 * PAGE, (1 << 32) + 475 * PAGE, 4096] {
        device.dma_write(DmaRange { iova, length: 8 });
    }
    device.dma_write(DmaRange { iova: (1 << 40) + 69 * PAGE, length: 100 * PAGE });
    dirty.set(7..8);
    log.collect(0, &mut dirty).unwrap();
    assert_eq!(set(&dirty), [7, 24 + 63, 24 + 64, 24 + 999, 1024 + 475]);
    let mut again = PageBitmap::new(1500);
    log.collect(0, &mut again).unwrap();
    assert!(again.is_clean());
    let mut other = PageBitmap::new(70);
    log.collect(1, &mut other).unwrap();
    assert_eq!(set(&other), [69]);
    assert!(matches!(log.collect(2, &mut other), Err(DirtyLogError::NoSuchBlock { block: 2, blocks: 2 })));
    assert!(matches!(log.collect(0, &mut other), Err(DirtyLogError::BitmapSize { .. })));
    log.stop().unwrap();
    log.stop().unwrap();
    assert!(device.dma_logging_start(PAGE, &[pages(0, 1)]).is_ok(), "the device's log is stopped");
}

#[test]
fn a_device_with_larger_pages_names_neighbouring_pages_too() {
    let device = ModelDevice::new(Config { dma_page_size: Some(4 * PAGE), ..Config::empty(0) });
    let mut log = DmaLog::new(device.clone(), "nic", &[100], vec![whole(0, 100)]).unwrap();
    log.start().unwrap();
    device.dma_write(DmaRange { iova: 5 * PAGE, length: 1 });
    let mut dirty = PageBitmap::new(100);
    log.collect(0, &mut dirty).unwrap();
    assert_eq!(set(&dirty), [4, 5, 6, 7]);
}

#[test]
fn a_block_of_many_pieces_is_reported_completely() {
    let device = ModelDevice::new(Config::empty(0));
    /// Pages that the log queries at a time.
    const PIECE: u64 = 8 * 65536;
    let count = 3 * PIECE + 77;
    let mut log = DmaLog::new(device.clone(), "nic", &[count], vec![whole(0, count)]).unwrap();
    log.start().unwrap();
    let written = [0, PIECE - 1, PIECE, 2 * PIECE + 5, count - 1];
    assert!(written.iter().all(|page| device.dma_write(pages(*page, 1))));
    let mut dirty = PageBitmap::new(count);
    log.collect(0, &mut dirty).unwrap();
    assert_eq!(dirty.count(), 5);
    assert!(written.iter().all(|page| dirty.contains(*page)));
}

#[test]
fn a_failed_report_is_not_repaired_by_the_next() {
    let device = ModelDevice::new(Config::empty(0));
    let mut log = DmaLog::new(device.clone(), "nic", &[100], vec![whole(0, 100)]).unwrap();
    log.start().unwrap();
    device.fail(Fault::of(Call::DmaLoggingReport));
    let mut dirty = PageBitmap::new(100);
    let error = log.collect(0, &mut dirty).unwrap_err();
    assert!(error.to_string().contains("nic"), "{error}");
    log.collect(0, &mut dirty).unwrap_err();
    log.stop().unwrap();
    log.start().unwrap();
    log.collect(0, &mut dirty).unwrap();
    device.fail(Fault::of(Call::DmaLoggingStop));
    log.stop().unwrap_err();
    device.dma_logging_stop().unwrap();
    device.fail(Fault::of(Call::DmaLoggingStart));
    log.start().unwrap_err();
    assert!(matches!(log.collect(0, &mut dirty), Err(DirtyLogError::NotStarted)));
}

#[test]
fn a_log_that_cannot_report_is_detected_at_the_start() {
    let device = ModelDevice::new(Config::empty(0));
    let mut log = DmaLog::new(device.clone(), "nic", &[100], vec![whole(0, 100)]).unwrap();
    device.fail(Fault { errno: libc::EOPNOTSUPP, ..Fault::of(Call::DmaLoggingReport) });
    let error = log.start().unwrap_err();
    assert!(error.to_string().contains("report"), "{error}");
    assert!(matches!(log.collect(0, &mut PageBitmap::new(100)), Err(DirtyLogError::NotStarted)));
    assert_eq!(errno(device.dma_logging_stop()), libc::EINVAL, "the device's log is stopped");
    log.start().unwrap();
}

#[test]
fn mappings_that_do_not_fit_are_refused() {
    let new = |mappings| DmaLog::new(ModelDevice::new(Config::empty(0)), "nic", &[100], mappings).map(|_| ());
    assert!(matches!(new(vec![whole(1, 1)]), Err(DirtyLogError::NoSuchBlock { block: 1, blocks: 1 })));
    let good = whole(0, 100);
    for bad in [
        DmaMapping { pages: 101, ..good },
        DmaMapping { pages: 0, ..good },
        DmaMapping { first_page: u64::MAX, ..good },
        DmaMapping { iova: 1, ..good },
        DmaMapping { iova: 0u64.wrapping_sub(PAGE), ..good },
    ] {
        assert!(matches!(new(vec![bad]), Err(DirtyLogError::System { .. })), "{bad:?}");
    }
    assert!(matches!(new(vec![good, good]), Err(DirtyLogError::System { .. })), "overlapping");
    new(vec![]).unwrap();
}

/// As in a monitor: one log of the CPUs, one per device, and the last round after the devices stopped.
#[test]
fn in_a_guests_log_a_device_is_one_of_several() {
    let device = ModelDevice::new(Config::empty(0));
    let cpus = ReportedLog::new(&[100]);
    let marker = cpus.marker();
    let nic = DmaLog::new(device.clone(), "nic", &[100], vec![whole(0, 100)]).unwrap();
    let mut log = UnionLog::new(vec![Box::new(cpus), Box::new(nic)]);
    log.start().unwrap();
    marker.mark(0, 3..4);
    device.dma_write(pages(50, 2));
    device.set_state(State::StopCopy).unwrap();
    assert!(!device.dma_write(pages(60, 1)), "a stopped device writes nothing");
    let mut dirty = PageBitmap::new(100);
    log.collect(0, &mut dirty).unwrap();
    assert_eq!(set(&dirty), [3, 50, 51]);
}
