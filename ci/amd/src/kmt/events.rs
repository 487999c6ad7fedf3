//! Events, by which completion signals wake waiting host threads.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::types::{Event, EventDescriptor, Status};
use super::with;

struct State {
    signaled: bool,
    manual_reset: bool,
    // Counts the times that it was set; the first age is 1.
    age: u64,
}

#[derive(Default)]
struct Table {
    states: HashMap<u32, State>,
    last_id: u32,
}

/// The process's events.
#[derive(Default)]
pub(super) struct Events {
    table: Mutex<Table>,
    changed: Condvar,
}

impl Events {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets an event and wakes who waits for it. Says whether there is such an event.
    pub(super) fn set(&self, id: u32) -> bool {
        let mut table = self.lock();
        let Some(state) = table.states.get_mut(&id) else { return false };
        state.signaled = true;
        state.age += 1;
        self.changed.notify_all();
        true
    }
}

/// Slots that the hardware would write an event's id to.
static MAILBOXES: [std::sync::atomic::AtomicU64; 4096] = [const { std::sync::atomic::AtomicU64::new(0) }; 4096];

/// Makes an event; the caller's pointer owns it until [`hsaKmtDestroyEvent`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtCreateEvent(
    descriptor: *const EventDescriptor,
    manual_reset: bool,
    signaled: bool,
    event: *mut *mut Event,
) -> Status {
    with(|driver| {
        if descriptor.is_null() || event.is_null() {
            return Status::InvalidParameter;
        }
        // SAFETY: the pointer was checked.
        let event_type = unsafe { (*descriptor).event_type };
        let mut table = driver.events.lock();
        let free = |id: &u32| !table.states.contains_key(id);
        let ids = MAILBOXES.len() as u32;
        let Some(id) = (1..ids).map(|n| (table.last_id + n - 1) % (ids - 1) + 1).find(free) else {
            return Status::NoMemory;
        };
        table.last_id = id;
        table.states.insert(id, State { signaled, manual_reset, age: 1 });
        let mailbox = MAILBOXES[id as usize].as_ptr() as u64;
        let made =
            Event { event_id: id, event_type, data: [0; 5], hw_data1: id.into(), hw_data2: mailbox, hw_data3: id };
        // SAFETY: the pointer was checked.
        unsafe { super::output(event, Box::into_raw(Box::new(made))) }
    })
}

/// Destroys an event.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtDestroyEvent(event: *mut Event) -> Status {
    with(|driver| {
        if event.is_null() {
            return Status::InvalidHandle;
        }
        // SAFETY: the pointer came from `hsaKmtCreateEvent`, and the caller gives it up.
        let event = unsafe { Box::from_raw(event) };
        let id = event.event_id;
        driver.events.lock().states.remove(&id);
        driver.events.changed.notify_all();
        Status::Success
    })
}

/// Sets an event.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtSetEvent(event: *mut Event) -> Status {
    with(|driver| {
        if event.is_null() {
            return Status::InvalidHandle;
        }
        // SAFETY: the pointer came from `hsaKmtCreateEvent`.
        let id = unsafe { (*event).event_id };
        if driver.events.set(id) { Status::Success } else { Status::InvalidHandle }
    })
}

/// Waits for one or all events. An age tells how often the caller has seen an event set: one that was set since is ready.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtWaitOnMultipleEvents_Ext(
    events: *const *mut Event,
    count: u32,
    all: bool,
    milliseconds: u32,
    ages: *mut u64,
) -> Status {
    with(|driver| {
        if events.is_null() || count == 0 {
            return Status::InvalidParameter;
        }
        let count = count as usize;
        // SAFETY: the caller gives `count` events that it has not destroyed.
        let ids: Vec<u32> = (0..count).map(|n| unsafe { (**events.add(n)).event_id }).collect();
        // SAFETY: the caller gives `count` ages or none.
        let known: Vec<u64> = (0..count).map(|n| if ages.is_null() { 0 } else { unsafe { *ages.add(n) } }).collect();
        let limit = u64::from(milliseconds).min(3_600_000);
        let deadline = Instant::now() + Duration::from_millis(limit);
        let mut table = driver.events.lock();
        loop {
            let ready = |n: usize| match table.states.get(&ids[n]) {
                Some(state) if known[n] != 0 => state.age != known[n],
                Some(state) => state.signaled,
                None => true, // destroyed
            };
            let ready_count = (0..count).filter(|n| ready(*n)).count();
            if ready_count == count || (!all && ready_count > 0) {
                break;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Status::WaitTimeout;
            }
            let waited = driver.events.changed.wait_timeout(table, left);
            table = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        for (n, id) in ids.iter().enumerate() {
            let Some(state) = table.states.get_mut(id) else { continue };
            if !state.manual_reset {
                state.signaled = false;
            }
            if known[n] != 0 {
                // SAFETY: the caller gives `count` ages.
                unsafe { *ages.add(n) = state.age };
            }
        }
        Status::Success
    })
}

/// Waits for one event.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtWaitOnEvent_Ext(event: *mut Event, milliseconds: u32, age: *mut u64) -> Status {
    // SAFETY: one event and one age or none.
    unsafe { hsaKmtWaitOnMultipleEvents_Ext(&raw const event, 1, true, milliseconds, age) }
}
