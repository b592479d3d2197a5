//! How a request passes through a device: in parts, a few at a time.
//!
//! A part is one submission: a batch of descriptors where the queue accepts batches, else the descriptor of one item,
//! or, for zero maps, one descriptor over a run of adjacent pages (*range first*: the device stops at the first page
//! that is not zero, and the next range begins behind that page). Every part has its own record, and only these records
//! are polled. The records of a batch's members are read only if the batch's record shows that not all results were as
//! predicted, by the thread that collects the completion.

use sterna_idxd::{Completion, Descriptor, Status, SubmitError, descriptor_offset as at};
use sterna_memory::PAGE_SIZE;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::engine::device::Device;
use crate::engine::{Begun, OffloadEngine, Progress, Whose};
use crate::kind::{Cause, Kind};
use crate::operation::Operation;
use crate::request::{Answer, Item, Request};
use crate::share::{AdmissionDecision, AdmissionRequest};
use crate::state::State;
use crate::sync::lock_std;
use crate::time::{NEVER, Nanos};
use crate::work::{Form, PARTS, Part, Parts, Place, Run};

/// The first pause after a refused submission; it doubles.
const FIRST_PAUSE: Nanos = 2_000;
const MAX_PAUSE: Nanos = 256_000;
/// The delay of the first look at an overdue part; each further look waits a quarter of the part's age.
const SHORTEST_LOOK: Nanos = 5_000;
const MAX_LOOK: Nanos = 5_000_000;
/// The shortest and the longest run of a range-first zero map, in pages.
const SHORTEST_RUN: u32 = 1;
/// Adjacent pages that are submitted as one range where a batch is possible too.
const WORTH_A_RUN: u32 = 16;
const MAX_RUN: u32 = 128;

/// The meaning of a device's result for one item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// The page is zero.
    Zero,
    /// The page is not.
    NotZero,
    /// The item's answer.
    Answer(Answer),
    /// The CPU has to do the item.
    Rest(Cause),
    /// The CPU has to do the item, and the device is not trusted any more.
    Broken(Status),
}

/// How a kind of device is instructed, and how its records are read.
pub(crate) trait Dialect: std::fmt::Debug + Send + Sync {
    /// Its kind.
    const KIND: Kind;

    /// Returns whether it can do item `item` on a queue with this limit of a transfer.
    fn takes(&self, request: &Request, item: usize, max_transfer: u64) -> bool;

    /// Returns the descriptor of item `item`, as part number `part` or as a member of a batch.
    fn describe(&self, request: &Request, item: usize, part: Option<usize>, expect_zero: bool) -> Descriptor;

    /// Returns the record of part `part`, if it is written, and its bytes for the trace.
    fn poll(&self, request: &Request, part: usize) -> Option<Completion>;

    /// Returns what the record of part `part`, which holds item `item` alone, means.
    fn read(&self, request: &Request, item: usize, part: usize, completion: &Completion) -> Meaning;

    /// Returns what the record of item `item`, a member of a batch, means.
    fn member(&self, request: &Request, item: usize, completion: &Completion) -> Meaning;
}

/// The engine over all devices of dialect `D`.
#[derive(Debug)]
pub(crate) struct Accelerator<D> {
    dialect: D,
    devices: Vec<Arc<Device>>,
    next: AtomicUsize,
}

impl<D: Dialect> Accelerator<D> {
    pub(crate) fn new(dialect: D, devices: Vec<Arc<Device>>) -> Self {
        Self { dialect, devices, next: AtomicUsize::new(0) }
    }

    fn device_of<'a>(&'a self, request: &Request) -> &'a Arc<Device> {
        &self.devices[request.work.parts.device]
    }

    /// Returns the next device in service that supports the request's operation, on the node of its pages if there is
    /// one.
    fn choose(&self, request: &Request) -> Option<usize> {
        let node = request.regions.iter().find_map(|region| region.node());
        let turn = self.next.fetch_add(1, Relaxed);
        let able = |at: &usize| self.devices[*at].in_service() && self.devices[*at].does(request.operation);
        let in_service = || (0..self.devices.len()).filter(able);
        let near = |at: &usize| node.is_none() || self.devices[*at].node.is_none() || self.devices[*at].node == node;
        // A device taken out between the count and the choice only disturbs the rotation.
        let in_turn = |count: usize| if count == 0 { 0 } else { turn % count };
        let chosen = in_service().filter(near).nth(in_turn(in_service().filter(near).count()));
        chosen.or_else(|| in_service().nth(in_turn(in_service().count())))
    }

    /// Makes the next part of the items that are in no part yet.
    fn next_part(&self, request: &mut Request) -> Option<Part> {
        let queue = &self.devices[request.work.parts.device].queues[request.work.parts.queue];
        let items = request.items.len() as u32;
        let first = request.work.parts.cursor;
        if first == items {
            return None;
        }
        let (form, count) = if queue.max_batch > 1 {
            let longest = (queue.max_transfer / PAGE_SIZE as u64).min(MAX_RUN.into()) as u32;
            let count = within(request, first, queue.max_batch.min(items - first));
            // Where all pages were zero, one descriptor asks for a whole run of them.
            let run = match request.work.parts.expect_run {
                true => side_by_side(request, first, count.min(longest)),
                false => 0,
            };
            match count {
                _ if run >= WORTH_A_RUN => (Form::Range, run),
                1 => (Form::Single, 1),
                _ => (Form::Batch, count),
            }
        } else if request.operation == Operation::ZeroMap {
            let longest = (queue.max_transfer / PAGE_SIZE as u64).clamp(1, MAX_RUN.into()) as u32;
            (Form::Range, within(request, first, side_by_side(request, first, request.work.parts.stride.min(longest))))
        } else {
            (Form::Single, 1)
        };
        request.work.parts.cursor += count;
        Some(Part { place: Place::Waiting, form, run: (first, count), ..Part::default() })
    }

    /// Writes the descriptors of the members of a batch, and clears their records.
    fn describe_members(&self, request: &Request, items: std::ops::Range<usize>) {
        let lists = request.work.lists();
        let expect_zero = request.work.parts.expect_zero;
        let mut template = None;
        for item in items {
            let member = lists.member(item);
            member.clear();
            let descriptor = match template {
                // All pages of a zero map have the same descriptor except for two addresses.
                Some(Template(mut bytes)) => {
                    let source = request.items[item].first.expose_provenance() as u64;
                    bytes[at::RECORD..at::RECORD + 8].copy_from_slice(&member.address().to_le_bytes());
                    bytes[at::SOURCE..at::SOURCE + 8].copy_from_slice(&source.to_le_bytes());
                    Descriptor::from_bytes(bytes)
                }
                None => self.dialect.describe(request, item, None, expect_zero).with_record(member.address()),
            };
            if request.operation == Operation::ZeroMap && template.is_none() {
                template = Some(Template(*descriptor.as_bytes()));
            }
            // SAFETY: inside the lists (checked there), aligned; no device has this part of them, as it is not submitted.
            unsafe { lists.descriptor(item).write(descriptor) };
        }
    }

    /// Submits part `number`. An error gives the cause; [`Cause::QueueFull`] is worth a retry.
    fn submit(&self, request: &mut Request, number: usize, now: Nanos) -> Result<(), Cause> {
        let device = self.device_of(request);
        if !device.in_service() {
            return Err(Cause::OutOfService);
        }
        let queue = &device.queues[request.work.parts.queue];
        let part = request.work.parts.parts[number];
        let (first, count) = (part.run.0 as usize, part.run.1 as usize);
        let expect_zero = request.work.parts.expect_zero;
        let lists = request.work.lists();
        let descriptor = match part.form {
            Form::Single => self.dialect.describe(request, first, Some(number), expect_zero),
            Form::Range => {
                let bytes = (count * PAGE_SIZE) as u32;
                let source = request.items[first].first.expose_provenance() as u64;
                Descriptor::compare_pattern(source, 0, bytes).with_record(lists.part(number).address())
            }
            Form::Batch => {
                self.describe_members(request, first..first + count);
                let list = lists.descriptor(first).expose_provenance() as u64;
                Descriptor::batch(list, count as u32).with_record(lists.part(number).address())
            }
        };
        lists.iaa_part(number).clear();
        // SAFETY: all that the descriptor names is memory of this request (lists, buffer) or of regions it has entered. The
        // request stays as it is until the part's record was seen, or is quarantined (`State`).
        let said = unsafe { queue.submit(&descriptor) };
        match said {
            Some(Ok(())) => {}
            Some(Err(SubmitError::Busy)) => return Err(Cause::QueueFull),
            None => return Err(Cause::OutOfService),
            Some(Err(error)) => {
                device.take_out(&error.to_string());
                return Err(Cause::DeviceError);
            }
        }
        // Before anything else: whatever happens to this thread, the memory is the device's from now on.
        request.work.parts.parts[number].place = Place::InDevice;
        let bytes = bytes_of(request, &part);
        let predicted = lock_std(&device.admission).predictors[request.operation.index()].predict(bytes, count as u32);
        let lists = request.work.lists();
        let traced = device.trace().map(|trace| {
            let members = if part.form == Form::Batch { first..first + count } else { 0..0 };
            trace.submitted(now, &queue.name, &descriptor, members.map(|item| lists.descriptor_bytes(item)))
        });
        let backlog = device.backlog(now);
        queue.accepted();
        let due = device.submitted(predicted, now);
        let patience = device.common.patience();
        let part = &mut request.work.parts.parts[number];
        part.traced = traced.unwrap_or(0);
        (part.submitted, part.due) = (now, due.max(now + 1));
        part.deadline = now.saturating_add(patience).saturating_add(8 * (backlog + predicted));
        Ok(())
    }

    /// Fills the places that are free with parts, and submits those that wait.
    fn refill(&self, request: &mut Request, now: Nanos) {
        for number in 0..PARTS {
            if request.work.parts.parts[number].place == Place::Nowhere {
                match self.next_part(request) {
                    Some(part) => request.work.parts.parts[number] = part,
                    None => continue,
                }
            }
            if request.work.parts.parts[number].place != Place::Waiting {
                continue;
            }
            if request.work.parts.parts[number].due > now {
                return;
            }
            match self.submit(request, number, now) {
                Ok(()) => request.work.parts.refusals = 0,
                Err(Cause::QueueFull) if self.refused(request, number, now) => return,
                Err(cause) => self.give_up(request, cause),
            }
        }
    }

    /// Records that the queue refused part `number`. Returns whether it is worth a retry.
    fn refused(&self, request: &mut Request, number: usize, now: Nanos) -> bool {
        let device = self.device_of(request);
        let counters = device.common.statistics.of(request.operation, D::KIND);
        counters.retries.fetch_add(1, Relaxed);
        let pause = pause(request.work.parts.refusals, now ^ std::ptr::from_ref(request).addr() as u64);
        let queue = &device.queues[request.work.parts.queue];
        let limit = queue.retries(device.common.settings.retries);
        let parts = &mut request.work.parts;
        parts.refusals += 1;
        parts.parts[number].due = now + pause;
        let retry = parts.refusals <= limit;
        if !retry {
            queue.refused();
        }
        retry
    }

    /// Leaves all items that the device does not have to the CPU.
    fn give_up(&self, request: &mut Request, cause: Cause) {
        let mut left = 0;
        for number in 0..PARTS {
            let part = &mut request.work.parts.parts[number];
            if part.place == Place::Waiting {
                part.place = Place::Nowhere;
                let (first, count) = part.run;
                request.work.rest.push(Run { first, count });
                left += count;
            }
        }
        let (first, count) = (request.work.parts.cursor, request.items.len() as u32 - request.work.parts.cursor);
        if count > 0 {
            request.work.rest.push(Run { first, count });
            request.work.parts.cursor += count;
        }
        let counters = self.device_of(request).common.statistics.of(request.operation, D::KIND);
        counters.fell_back(cause, u64::from(left + count));
    }

    /// Handles a quiet device: it has discarded everything without a record.
    fn never_done(&self, request: &mut Request) {
        for number in 0..PARTS {
            let part = request.work.parts.parts[number];
            if part.place == Place::InDevice && self.dialect.poll(request, number).is_none() {
                request.work.parts.parts[number].place = Place::Waiting;
            }
        }
        self.give_up(request, Cause::OutOfService);
    }

    /// Handles the seen record of part `number`.
    fn completed(&self, request: &mut Request, number: usize, completion: &Completion, now: Nanos) {
        let part = request.work.parts.parts[number];
        let device = self.device_of(request);
        device.queues[request.work.parts.queue].seen();
        device.completed(now);
        let bytes = bytes_of(request, &part);
        let predictor = &mut lock_std(&device.admission).predictors[request.operation.index()];
        if completion.status.is_done() {
            predictor.learn(bytes, part.run.1, part.submitted, now);
        }
        if let Some(trace) = device.trace() {
            let lists = request.work.lists();
            let (first, end) = (part.run.0 as usize, (part.run.0 + part.run.1) as usize);
            let members = if part.form == Form::Batch { first..end } else { 0..0 };
            let record = lists.part_bytes(number);
            let record = if D::KIND == Kind::Iaa { &record[..] } else { &record[..32] };
            trace.completed(now, part.traced, record, members.map(|item| lists.member_bytes(item)));
        }
        request.work.parts.nanos += now.saturating_sub(part.submitted);
        request.work.parts.parts[number].place = Place::Nowhere;
        match part.form {
            Form::Batch => self.batch_completed(request, &part, completion),
            Form::Single => {
                let item = part.run.0 as usize;
                let meaning = self.dialect.read(request, item, number, completion);
                self.mean(request, item, meaning);
            }
            Form::Range => self.range_completed(request, number, &part, completion),
        }
    }

    fn batch_completed(&self, request: &mut Request, part: &Part, completion: &Completion) {
        let (first, count) = part.run;
        match (completion.status, request.operation) {
            // All results are as predicted: no member's record is read.
            (Status::Success, Operation::ZeroMap) => {
                if request.work.parts.expect_zero {
                    request.set_zero_run(first as usize, (first + count) as usize);
                }
                return;
            }
            (Status::Success, Operation::Copy | Operation::Place | Operation::ApplyDelta) => {
                for item in first..first + count {
                    request.answers[item as usize] = Answer::Written(request.items[item as usize].bytes);
                }
                return;
            }
            (status, _) if status.is_hardware_error() => self.device_of(request).take_out(&status.to_string()),
            _ => {}
        }
        request.work.review.push(Run { first, count });
    }

    /// Handles the record of a range of pages: they are zero up to where the device stopped.
    fn range_completed(&self, request: &mut Request, number: usize, part: &Part, completion: &Completion) {
        let (first, count) = part.run;
        let stopped = (completion.bytes_completed as usize / PAGE_SIZE) as u32;
        let cause = match (completion.status, completion.result) {
            (Status::Success, 0) => {
                request.set_zero_run(first as usize, (first + count) as usize);
                request.work.parts.stride = (request.work.parts.stride * 2).min(MAX_RUN);
                return;
            }
            (status, _) if stopped >= count && (status.is_success() || status.is_page_fault()) => {
                self.device_of(request).take_out("it stopped in a range of pages behind the last of them");
                Some(Cause::DeviceError)
            }
            (Status::Success, _) => None,
            (status, _) if status.is_page_fault() => Some(Cause::PageFault),
            (status, _) if status.is_hardware_error() => {
                self.device_of(request).take_out(&status.to_string());
                Some(Cause::DeviceError)
            }
            (status, _) if status.is_rejected() => Some(Cause::Unsuitable),
            _ => Some(Cause::DeviceError),
        };
        if matches!(cause, Some(Cause::Unsuitable | Cause::DeviceError)) {
            let counters = self.device_of(request).common.statistics.of(request.operation, D::KIND);
            counters.fell_back(cause.expect("matched above"), count.into());
            return request.work.rest.push(Run { first, count });
        }
        // The pages before are compared and equal. The page it stopped in has a difference, or was partly not present.
        request.set_zero_run(first as usize, (first + stopped) as usize);
        if let Some(cause) = cause {
            self.mean(request, (first + stopped) as usize, Meaning::Rest(cause));
        }
        request.work.parts.stride = stopped.max(request.work.parts.stride / 2).max(SHORTEST_RUN);
        let next = first + stopped + 1;
        let left = first + count - next;
        if left > 0 {
            let batches = self.device_of(request).queues[request.work.parts.queue].max_batch > 1;
            let part = &mut request.work.parts.parts[number];
            (part.place, part.run, part.due) = (Place::Waiting, (next, left), 0);
            if batches {
                part.form = if left > 1 { Form::Batch } else { Form::Single };
            }
        }
    }

    fn mean(&self, request: &mut Request, item: usize, meaning: Meaning) {
        let device = self.device_of(request);
        let cause = match meaning {
            Meaning::Zero => return request.set_zero(item),
            Meaning::NotZero => return,
            Meaning::Answer(answer) => return request.answers[item] = answer,
            Meaning::Rest(cause) => cause,
            Meaning::Broken(status) if status.is_done() => {
                device.take_out("a record says that all is done, with a result that cannot be");
                Cause::DeviceError
            }
            Meaning::Broken(status) => {
                device.take_out(&status.to_string());
                Cause::DeviceError
            }
        };
        device.common.statistics.of(request.operation, D::KIND).fell_back(cause, 1);
        // Page faults come in runs, and so do the items left to the CPU.
        let item = item as u32;
        match request.work.rest.last_mut() {
            Some(run) if run.first + run.count == item => run.count += 1,
            _ => request.work.rest.push(Run { first: item, count: 1 }),
        }
    }

    /// Returns whether a part without an answer will get none any more.
    fn is_lost(&self, request: &Request, part: &Part, now: Nanos) -> bool {
        let device = self.device_of(request);
        match device.in_service() {
            true => device.given_up(part.submitted, part.deadline, now),
            // An operation that only reads is done again. One that writes guest memory must not be done again while the
            // device may still write: it waits while the device is drained and closed.
            false => !request.operation.writes_guest() || now >= part.deadline,
        }
    }

    fn end(&self, request: &mut Request, now: Nanos, completed: bool) {
        let device = self.device_of(request);
        let grant = request.work.grant.take();
        device.return_grant(grant, completed.then_some(request.work.begun), now);
        let counters = device.common.statistics.of(request.operation, D::KIND);
        counters.device_nanos.fetch_add(request.work.parts.nanos, Relaxed);
    }
}

impl<D: Dialect> OffloadEngine for Accelerator<D> {
    fn kind(&self) -> Kind {
        D::KIND
    }

    fn does(&self, operation: Operation) -> bool {
        self.devices.iter().any(|device| device.does(operation))
    }

    fn begin(&self, request: &mut Request, whose: Whose, now: Nanos) -> Begun {
        debug_assert_eq!(request.state(), State::Queued);
        let Whose { vm, channel, weight, urgent } = whose;
        let Parts { refusals, not_before, .. } = request.work.parts;
        if now < not_before {
            return Begun::Wait(not_before);
        }
        // On another device it would start at the end of the queue, and the requests behind it here would wait for
        // nothing.
        let waits = std::mem::take(&mut request.work.parts.waits) && self.device_of(request).in_service();
        let chosen = if waits { Some(request.work.parts.device) } else { self.choose(request) };
        let Some(chosen) = chosen else { return Begun::Spill(Cause::OutOfService) };
        // Also if it goes to the CPU: this device's share is notified how long that took.
        request.work.parts.device = chosen;
        let device = &self.devices[chosen];
        let Some(queue) = device.next_queue(request.operation, urgent, refusals) else {
            return Begun::Spill(Cause::Unsuitable);
        };
        // Only zero maps use the expectation, which is learned from zero maps; adjacent ranges of other operations are
        // no run of zeros.
        let expect_run = request.operation == Operation::ZeroMap && device.expects_run();
        let expect_zero = device.expects_zero();
        let max_transfer = device.queues[queue].max_transfer;
        if !(0..request.items.len()).all(|item| self.dialect.takes(request, item, max_transfer)) {
            return Begun::Spill(Cause::Unsuitable);
        }
        let max_bytes;
        {
            let mut admission = lock_std(&device.admission);
            let predicted =
                admission.predictors[request.operation.index()].predict(request.bytes, request.items.len() as u32);
            match admission.share.ask(&AdmissionRequest { vm, channel, weight, predicted, bytes: request.bytes }, now) {
                AdmissionDecision::Admit(grant) => request.work.grant = Some(grant),
                AdmissionDecision::Wait { until } => {
                    request.work.parts.waits = true;
                    return Begun::Wait(until.max(now + 1));
                }
                AdmissionDecision::Spill => return Begun::Spill(Cause::Spilled),
            }
            max_bytes = admission.share.largest_batch();
        }
        request.work.parts = Parts {
            device: chosen,
            queue,
            expect_zero,
            expect_run,
            stride: 16,
            refusals,
            max_bytes,
            ..Parts::default()
        };
        request.work.begun = now;
        let part = self.next_part(request).expect("a batch has items");
        request.work.parts.parts[0] = part;
        match self.submit(request, 0, now) {
            Ok(()) => {
                request.work.parts.refusals = 0;
                self.refill(request, now);
                request.work.due = request.work.parts.due();
                Begun::InDevice
            }
            Err(Cause::QueueFull) if self.refused(request, 0, now) => {
                let until = request.work.parts.parts[0].due;
                request.work.parts.not_before = until;
                // The grant is for this device; the next attempt may use another.
                self.give_grant_back(request, now);
                Begun::Wait(until)
            }
            Err(cause) => {
                self.give_grant_back(request, now);
                request.work.parts.refusals = 0;
                Begun::Spill(cause)
            }
        }
    }

    fn advance(&self, request: &mut Request, now: Nanos) -> Progress {
        let mut lost = None;
        for number in 0..PARTS {
            let part = request.work.parts.parts[number];
            if part.place != Place::InDevice {
                continue;
            }
            if let Some(completion) = self.dialect.poll(request, number) {
                self.completed(request, number, &completion, now);
            } else {
                if self.is_lost(request, &part, now) {
                    lost = Some(number);
                }
                if now >= part.due {
                    let late = ((now - part.submitted) / 4).clamp(SHORTEST_LOOK, MAX_LOOK);
                    request.work.parts.parts[number].due = now + late;
                }
            }
        }
        if !self.device_of(request).in_service() && self.device_of(request).is_quiet() {
            self.never_done(request);
        } else if let Some(number) = lost {
            let part = request.work.parts.parts[number];
            // Polls a second time: this thread may have been off its CPU between the record and the clock, and later
            // records may show that the device works.
            match self.dialect.poll(request, number) {
                Some(completion) => self.completed(request, number, &completion, now),
                None if !self.is_lost(request, &part, now) => {}
                None => {
                    let silent = now.saturating_sub(part.submitted) / 1_000_000;
                    self.device_of(request).take_out(&format!("no answer for {silent} ms"));
                    self.end(request, now, false);
                    return Progress::Lost;
                }
            }
        }
        self.refill(request, now);
        match request.work.parts.due() {
            NEVER => {
                self.end(request, now, true);
                Progress::Done
            }
            due => {
                request.work.due = due.max(now + 1);
                Progress::Going
            }
        }
    }

    fn settle(&self, request: &mut Request) {
        while let Some(Run { first, count }) = request.work.review.pop() {
            for item in first as usize..(first + count) as usize {
                if request.operation == Operation::ZeroMap {
                    // For nearly all pages the first word is enough.
                    match request.work.lists().member_result(item) {
                        Some(0) => {
                            request.set_zero(item);
                            continue;
                        }
                        Some(_) => continue,
                        None => {}
                    }
                }
                let meaning = match request.work.lists().member(item).poll() {
                    // Abandoned, or behind a page of the list that was not present.
                    None => Meaning::Rest(Cause::PageFault),
                    Some(completion) => self.dialect.member(request, item, &completion),
                };
                self.mean(request, item, meaning);
            }
        }
        if request.operation == Operation::ZeroMap {
            let zero: u32 = request.zero[..request.items.len().div_ceil(64)].iter().map(|word| word.count_ones()).sum();
            let (zero, all) = (zero as usize, request.items.len());
            self.device_of(request).expect_zero(2 * zero > all, 8 * zero >= 7 * all);
        }
    }

    fn device(&self, request: &Request) -> usize {
        request.work.parts.device
    }

    fn report_wrong_result(&self, device: usize, what: &str) {
        self.devices[device].take_out(what);
    }

    fn still_zero(&self, request: &Request, item: usize, now: Nanos) -> Option<bool> {
        let page = request.items[item].first;
        let region = request.regions.iter().find(|region| region.contains(page))?;
        self.device_of(request).still_zero(request.work.parts.queue, page, region, now)
    }

    fn second_looks(&self, now: Nanos) -> bool {
        self.devices.iter().filter(|device| device.second_look(now)).count() > 0
    }

    fn quarantine(&self, request: Box<Request>) {
        let device = Arc::clone(self.device_of(&request));
        device.keep(request);
    }

    fn quarantined(&self) -> usize {
        self.devices.iter().map(|device| device.quarantined()).sum()
    }

    fn spilled(&self, request: &Request, took: Nanos, now: Nanos) {
        lock_std(&self.device_of(request).admission).share.spilled(request.bytes, took, now);
    }
}

impl<D> Accelerator<D> {
    fn give_grant_back(&self, request: &mut Request, now: Nanos) {
        let device = &self.devices[request.work.parts.device];
        device.return_grant(request.work.grant.take(), None, now);
    }
}

/// Returns the bytes of a part's items.
fn bytes_of(request: &Request, part: &Part) -> u64 {
    let (first, count) = (part.run.0 as usize, part.run.1 as usize);
    match request.operation {
        Operation::ZeroMap => (count * PAGE_SIZE) as u64,
        _ => request.items[first..first + count].iter().map(|item| u64::from(item.bytes)).sum(),
    }
}

/// Returns how many of the `count` items from `first` a part may have: at least one.
fn within(request: &Request, first: u32, count: u32) -> u32 {
    let mut left = request.work.parts.max_bytes;
    let fits = |item: &&Item| match left.checked_sub(item.bytes.into()) {
        Some(rest) => {
            left = rest;
            true
        }
        None => false,
    };
    let first = first as usize;
    request.items[first..first + count as usize].iter().take_while(fits).count().max(1) as u32
}

/// The 64 bytes that the members of a batch have in common.
#[derive(Clone, Copy)]
struct Template([u8; 64]);

/// Returns how many pages from `first`, at most `max`, are adjacent.
fn side_by_side(request: &Request, first: u32, max: u32) -> u32 {
    let items = &request.items[first as usize..];
    let mut count = 1;
    while count < (max as usize).min(items.len())
        && items[count].first == items[count - 1].first.wrapping_add(PAGE_SIZE)
    {
        count += 1;
    }
    count as u32
}

/// Returns the pause after `refusals` refusals: it doubles each time, with a random part per request.
fn pause(refusals: u32, salt: u64) -> Nanos {
    let longest = (FIRST_PAUSE << refusals.min(16)).min(MAX_PAUSE);
    // One round of splitmix64's mixing.
    let mixed = (salt ^ (salt >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    longest / 2 + (mixed ^ (mixed >> 27)) % (longest / 2)
}
