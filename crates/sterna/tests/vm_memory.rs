//! The adapter of `vm-memory`: which pages its dirty log names, and which blocks its regions become.

use std::num::NonZeroUsize;

use sterna::vm_memory::{BitmapLog, guest_ram};
use sterna::{Backing, DirtyLog, DirtyLogError, PAGE_SIZE, PageBitmap};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

const PAGE: u64 = PAGE_SIZE as u64;
/// Two regions with a hole between them, of 70 and 3 pages.
const REGIONS: [(GuestAddress, usize); 2] = [(GuestAddress(0), 70 << 12), (GuestAddress(1 << 20), 3 << 12)];

fn memory() -> GuestMemoryMmap<AtomicBitmap> {
    GuestMemoryMmap::from_ranges(&REGIONS).unwrap()
}

fn collected(log: &mut BitmapLog, block: usize) -> Vec<u64> {
    let pages = REGIONS[block].1 as u64 / PAGE;
    let mut dirty = PageBitmap::new(pages);
    log.collect(block, &mut dirty).unwrap();
    (0..pages).filter(|page| dirty.contains(*page)).collect()
}

#[test]
fn the_log_names_the_pages_that_were_written_since_and_no_others() {
    let memory = memory();
    let mut log = BitmapLog::new(&memory).unwrap();
    memory.write_obj(1u64, GuestAddress(5 * PAGE)).unwrap();
    log.start().unwrap();
    assert_eq!(collected(&mut log, 0), [0; 0], "written before the start");
    // Across a page boundary, the last page, and the second region.
    memory.write_obj(1u64, GuestAddress(3 * PAGE - 4)).unwrap();
    memory.write_slice(&[1], GuestAddress(70 * PAGE - 1)).unwrap();
    memory.write_obj(1u16, GuestAddress((1 << 20) + PAGE)).unwrap();
    assert_eq!(collected(&mut log, 0), [2, 3, 69]);
    assert_eq!(collected(&mut log, 1), [1]);
    assert_eq!((collected(&mut log, 0), collected(&mut log, 1)), (vec![], vec![]), "named once");
    log.stop().unwrap();
    let late = log.collect(0, &mut PageBitmap::new(70));
    assert!(matches!(late, Err(DirtyLogError::NotStarted)), "{late:?}");
}

#[test]
fn a_page_that_is_set_already_stays_set() {
    let memory = memory();
    let mut log = BitmapLog::new(&memory).unwrap();
    log.start().unwrap();
    let mut dirty = PageBitmap::new(3);
    dirty.set(0..1);
    memory.write_obj(1u8, GuestAddress((1 << 20) + 2 * PAGE)).unwrap();
    log.collect(1, &mut dirty).unwrap();
    assert!(dirty.contains(0) && !dirty.contains(1) && dirty.contains(2));
}

#[test]
fn wrong_calls_are_refused() {
    let mut log = BitmapLog::new(&memory()).unwrap();
    log.start().unwrap();
    assert!(matches!(log.start(), Err(DirtyLogError::AlreadyStarted)));
    let unknown = log.collect(2, &mut PageBitmap::new(3));
    assert!(matches!(unknown, Err(DirtyLogError::NoSuchBlock { block: 2, blocks: 2 })), "{unknown:?}");
    let small = log.collect(0, &mut PageBitmap::new(69));
    assert!(matches!(small, Err(DirtyLogError::BitmapSize { block: 0, pages: 70, given: 69 })), "{small:?}");
}

#[test]
fn a_bitmap_of_larger_pages_is_refused() {
    let bitmap = AtomicBitmap::new(64 << 10, NonZeroUsize::new(64 << 10).unwrap());
    let region = vm_memory::mmap::MmapRegionBuilder::new_with_bitmap(64 << 10, bitmap).build().unwrap();
    let region = GuestRegionMmap::new(region, GuestAddress(0)).unwrap();
    let memory = GuestMemoryMmap::from_regions(vec![region]).unwrap();
    let refused = BitmapLog::new(&memory).map(drop);
    assert!(matches!(refused, Err(DirtyLogError::BitmapSize { block: 0, pages: 16, given: 1 })), "{refused:?}");
}

#[test]
fn regions_become_blocks_of_their_backing() {
    let anonymous = guest_ram(&memory()).unwrap();
    let shapes: Vec<_> = anonymous.blocks().iter().map(|block| (block.name(), block.bytes())).collect();
    assert_eq!(shapes, [("ram0", 70 * PAGE), ("ram1", 3 * PAGE)]);
    assert!(anonymous.blocks().iter().all(|block| matches!(block.backing(), Backing::Anonymous)));

    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(16 * PAGE).unwrap();
    let offset = FileOffset::new(file, 4 * PAGE);
    let shared = GuestMemoryMmap::<()>::from_ranges_with_files([(GuestAddress(0), 8 << 12, Some(offset.clone()))]);
    let shared = guest_ram(&shared.unwrap()).unwrap();
    assert!(matches!(shared.blocks()[0].backing(), Backing::Shared(_, at) if *at == 4 * PAGE), "{shared:?}");

    // As a guest that was restored from a snapshot has it.
    let (read_write, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_NORESERVE);
    let region = MmapRegion::<()>::build(Some(offset), 8 << 12, read_write, private).unwrap();
    let restored = GuestMemoryMmap::from_regions(vec![GuestRegionMmap::new(region, GuestAddress(0)).unwrap()]);
    let restored = guest_ram(&restored.unwrap()).unwrap();
    assert!(matches!(restored.blocks()[0].backing(), Backing::Other), "{restored:?}");
}

#[test]
fn memory_that_cannot_be_written_is_no_guest_ram() {
    let read_only = MmapRegion::<()>::build(None, 1 << 12, libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let region = GuestRegionMmap::new(read_only.unwrap(), GuestAddress(0)).unwrap();
    let refused = guest_ram(&GuestMemoryMmap::from_regions(vec![region]).unwrap()).unwrap_err().to_string();
    assert!(refused.contains("ram0") && refused.contains("cannot be read and written"), "{refused}");
}

#[test]
fn blocks_keep_their_memory_mapped() {
    let memory = memory();
    memory.write_obj(0x5aa5u16, GuestAddress(PAGE)).unwrap();
    let ram = guest_ram(&memory).unwrap();
    drop(memory);
    let mut page = [0; PAGE_SIZE];
    ram.blocks()[0].read_page(1, &mut page).unwrap();
    assert_eq!(page[..2], [0xa5, 0x5a]);
}
