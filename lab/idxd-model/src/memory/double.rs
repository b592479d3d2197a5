//! A memory without a process, for tests that control the state of every page.

use std::collections::HashMap;
use std::sync::Mutex;

use super::{AddressSpace, Fault, PAGE};

/// The state of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageState {
    /// Readable and writable.
    Present,
    /// Readable; a write faults, and a page request does not resolve the fault.
    ReadOnly,
    /// Not present; a page request makes the page present.
    Absent,
    /// Not present, and cannot be made present.
    Forbidden,
}

type Page = (PageState, Box<[u8]>);

/// Pages by address; pages that were never set are [`PageState::Forbidden`].
#[derive(Debug, Default)]
pub struct TestMemory {
    pages: Mutex<HashMap<u64, Page>>,
}

impl TestMemory {
    /// Returns a memory without pages.
    pub fn new() -> TestMemory {
        TestMemory::default()
    }

    /// Sets the state of a range's pages. New pages are zero; existing ones keep their content.
    pub fn set(&self, address: u64, bytes: u64, state: PageState) {
        let mut pages = self.pages.lock().unwrap();
        for page in address / PAGE..(address + bytes).div_ceil(PAGE) {
            pages.entry(page).or_insert_with(|| (state, vec![0; PAGE as usize].into())).0 = state;
        }
    }

    /// Writes regardless of the pages' state.
    pub fn put(&self, address: u64, bytes: &[u8]) {
        let mut pages = self.pages.lock().unwrap();
        for (at, &byte) in (address..).zip(bytes) {
            let page = pages.entry(at / PAGE).or_insert_with(|| (PageState::Present, vec![0; PAGE as usize].into()));
            page.1[(at % PAGE) as usize] = byte;
        }
    }

    /// Reads regardless of the pages' state; missing pages read as zero.
    pub fn get(&self, address: u64, bytes: usize) -> Vec<u8> {
        let pages = self.pages.lock().unwrap();
        (address..address + bytes as u64)
            .map(|at| pages.get(&(at / PAGE)).map_or(0, |page| page.1[(at % PAGE) as usize]))
            .collect()
    }

    fn each(
        &self,
        address: u64,
        bytes: usize,
        usable: impl Fn(PageState) -> bool,
        mut with: impl FnMut(usize, &mut [u8]),
    ) -> Result<u32, Fault> {
        let mut pages = self.pages.lock().unwrap();
        let mut done = 0;
        while done < bytes {
            let at = address + done as u64;
            let start = (at % PAGE) as usize;
            let part = (bytes - done).min(PAGE as usize - start);
            match pages.get_mut(&(at / PAGE)) {
                Some(page) if usable(page.0) => with(done, &mut page.1[start..start + part]),
                _ => return Err(Fault { address: at, done }),
            }
            done += part;
        }
        Ok(0)
    }
}

impl AddressSpace for TestMemory {
    fn read(&self, address: u64, into: &mut [u8]) -> Result<u32, Fault> {
        let usable = |state| matches!(state, PageState::Present | PageState::ReadOnly);
        self.each(address, into.len(), usable, |at, page| into[at..at + page.len()].copy_from_slice(page))
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<u32, Fault> {
        self.each(
            address,
            from.len(),
            |state| state == PageState::Present,
            |at, page| {
                page.copy_from_slice(&from[at..at + page.len()]);
            },
        )
    }

    fn resolve(&self, address: u64, write: bool) -> bool {
        match self.pages.lock().unwrap().get_mut(&(address / PAGE)) {
            Some(page) => match page.0 {
                PageState::Absent => {
                    page.0 = PageState::Present;
                    true
                }
                PageState::ReadOnly => !write,
                PageState::Present => true,
                PageState::Forbidden => false,
            },
            None => false,
        }
    }
}
