//! The pages of the cache, and who has them.

use crate::rng::Rng;

/// A pool of pages. Pages are handed out in a shuffled order, as they lie in an engine that has run for a while.
#[derive(Debug)]
pub(crate) struct PagePool {
    free: Vec<i32>,
    taken: Vec<bool>,
}

impl PagePool {
    pub(crate) fn new(num_pages: usize, seed: u64) -> Self {
        let mut free: Vec<i32> = (0..num_pages as i32).collect();
        Rng::new(seed).shuffle(&mut free);
        Self { free, taken: vec![false; num_pages] }
    }

    /// Pages of the pool.
    pub(crate) fn len(&self) -> usize {
        self.taken.len()
    }

    /// Pages that nobody has.
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// `count` pages, or none at all if fewer are free.
    pub(crate) fn take(&mut self, count: usize) -> Option<Vec<i32>> {
        let rest = self.free.len().checked_sub(count)?;
        let pages = self.free.split_off(rest);
        for &page in &pages {
            self.taken[page as usize] = true;
        }
        Some(pages)
    }

    /// Takes pages back. One that was not handed out stays out of the pool.
    pub(crate) fn give_back(&mut self, pages: &[i32]) {
        for &page in pages {
            let was_taken = std::mem::replace(&mut self.taken[page as usize], false);
            debug_assert!(was_taken, "page {page} came back twice");
            if was_taken {
                self.free.push(page);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_or_nothing_and_no_page_twice() {
        let mut pool = PagePool::new(10, 7);
        let a = pool.take(6).unwrap();
        assert_eq!(pool.take(5), None);
        assert_eq!(pool.free(), 4);
        let b = pool.take(4).unwrap();
        let mut all: Vec<i32> = a.iter().chain(&b).copied().collect();
        all.sort_unstable();
        assert_eq!(all, (0..10).collect::<Vec<_>>());
        assert_eq!(pool.take(0), Some(vec![]));
        pool.give_back(&a);
        assert_eq!((pool.free(), pool.len()), (6, 10));
        assert!(pool.take(6).unwrap().iter().all(|page| !b.contains(page)));
    }

    #[test]
    fn order_is_seeded() {
        let take = |seed| PagePool::new(64, seed).take(64).unwrap();
        assert_eq!(take(1), take(1));
        assert_ne!(take(1), take(2));
    }

    #[test]
    #[cfg_attr(debug_assertions, should_panic(expected = "came back twice"))]
    fn a_page_that_comes_back_twice_is_not_free_twice() {
        let mut pool = PagePool::new(2, 0);
        let pages = pool.take(1).unwrap();
        pool.give_back(&pages);
        pool.give_back(&pages);
        assert_eq!(pool.free(), 2);
    }
}
