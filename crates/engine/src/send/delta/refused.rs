//! Refused pages that cannot be read again: retransmitted from the cache, or from the pages that are kept besides ([`super::underway`]).

use std::ops::Range;

use sterna_memory::PAGE_SIZE;

use super::cache::Key;
use super::{Deltas, push, push_unkept};

impl Deltas {
    /// Collects the pages to retransmit whole: those of `pages` in `block` whose newest content was in the packet `refused`. Newer
    /// content is in transit in a later packet. The error is a page that was not in the refused packet.
    pub(in super::super) fn collect_refused(&mut self, block: u16, pages: Range<u64>, refused: u64) -> Result<(), u64> {
        self.rest_runs.clear();
        self.rest.clear();
        self.all_whole = false;
        for list in [&mut self.changed, &mut self.replaced] {
            list.clear();
        }
        self.unkept.clear();
        for page in pages {
            let number = self.rest.len() / PAGE_SIZE;
            let kept = self.cache.find(Key::new(block, page)).map(|at| (at, self.cache.place(at).sequence));
            if let Some((at, sequence)) = kept.filter(|(_, sequence)| *sequence >= refused) {
                if sequence > refused {
                    continue;
                }
                self.rest.extend_from_slice(self.cache.page(at));
                self.replaced.push(at);
            } else {
                let newest =
                    self.underway.as_ref().and_then(|underway| Some((underway, underway.newest(block, page)?)));
                let (underway, newest) = newest.filter(|(_, newest)| newest.sequence >= refused).ok_or(page)?;
                if newest.sequence > refused || !underway.read(&newest, &mut self.rest) {
                    continue;
                }
                push_unkept(&mut self.unkept, page, number);
            }
            push(&mut self.rest_runs, page);
        }
        Ok(())
    }

    /// Records the number of the packet that retransmits the pages of [`Deltas::collect_refused`].
    pub(in super::super) fn retransmitted(&mut self, block: u16, number: u64) {
        self.number_places(number, number);
        if let Some(underway) = &mut self.underway {
            underway.push_all(number, block, &self.unkept, &self.rest);
        }
    }
}
