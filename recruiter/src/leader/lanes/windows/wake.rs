//! Wakes lanes that sleep, as many as the next rounds need.

use std::{collections::HashMap, time::Instant as Monotonic};

use recruiter_common::{instant::Instant, store::Lane};

use super::{Windows, asleep::Look, window::Window};
use crate::leader::{
    admission::{Admission, Room},
    fleet::{Kind, KindId},
};

/// How often the number of lanes that wake is doubled, if they wake in vain.
const MOST_DOUBLINGS: u32 = 10;

impl Windows {
    /// Wakes sleeping lanes whose jobs may start now and that the workers of the kinds in `free` take, while few lanes are ready: less than
    /// [`CROWD`], or fewer than the slots of these workers; more after each round that has woken some [in vain](Self::has_woken_in_vain).
    /// Full lanes, whose jobs wait for the permits of others, fill no slots: they are not ready, and wake only while there are less than
    /// [`CROWD`] of both. Returns whether others are left that may wake at once.
    pub(crate) fn wake(
        &mut self,
        free: &HashMap<KindId, usize>,
        kinds: &[Kind],
        admission: &Admission,
        now: Instant,
        at: Monotonic,
    ) -> bool {
        self.asleep_until = self.asleep_until.filter(|until| *until > now);
        if self.asleep.is_empty() {
            return false;
        }
        // Lanes that are not compared with each other are counted separately.
        let alike = |kind: KindId, lane: &Lane| (kind, admission.has_weights().then(|| lane.group.clone()), lane.priority);
        let may_start = |window: &Window| window.is_stale(at) || window.jobs.front().is_some_and(|job| job.scheduled_at <= now);
        let (mut all, mut full, mut ready) = (0, 0, HashMap::new());
        for (lane, window) in self.windows.iter().filter(|(lane, window)| lane.gate.is_some() && may_start(window)) {
            let room = admission.room_of(lane, now);
            full += usize::from(room.ahead > 0);
            if room.in_slots == 0 {
                continue;
            }
            all += 1;
            for kind in window.able.iter().filter(|kind| free.contains_key(kind)) {
                *ready.entry(alike(*kind, lane)).or_insert(0) += 1;
            }
        }
        let (crowd, ageing, mut opens_at, mut others_sleep) = (self.crowd, &self.ageing, self.asleep_until, false);
        let (more, mut in_slots) = (1 << self.woken_in_vain.min(MOST_DOUBLINGS), Vec::new());
        let (woken, are_left) = self.asleep.wake(|lane| {
            let able: Vec<KindId> = free.keys().copied().filter(|kind| kinds[*kind].takes(lane)).collect();
            let has_few = |kind: &KindId| ready.get(&alike(*kind, lane)).is_none_or(|ready| *ready < free[kind].saturating_mul(more));
            let is_wanted = all < crowd || (all < crowd.saturating_mul(4).max(1) && able.iter().any(has_few));
            if able.is_empty() || !is_wanted {
                others_sleep |= !able.is_empty();
                // The parts of a lane differ in their priorities.
                return if ageing.contains(&lane.group) { Look::Next } else { Look::Enough };
            }
            let room = admission.room_of(lane, now);
            if room == Room::default() {
                opens_at = opens_at.into_iter().chain(admission.opens_at(lane, now)).min();
                // A full group may have room for those that pass permits on.
                let may_start = admission.way(&Lane::new(&lane.group, &lane.class), now).is_ok();
                return if may_start { Look::Next } else { Look::Closed };
            }
            if room.in_slots == 0 {
                if all + full >= crowd {
                    return Look::Next;
                }
                full += 1;
                return Look::Wake;
            }
            all += 1;
            in_slots.push(lane.clone());
            able.iter().for_each(|kind| *ready.entry(alike(*kind, lane)).or_insert(0) += 1);
            Look::Wake
        });
        let horizon = self.horizon();
        for lane in woken {
            let mut window = Window::stale(horizon);
            window.learn_kinds(&lane, kinds);
            self.windows.insert(lane, window);
        }
        (self.asleep_until, self.woken) = (opens_at, if others_sleep { in_slots } else { Vec::new() });
        are_left
    }

    /// Whether lanes that this round has woken have no due jobs, while others sleep: then the next round wakes others, at once. Asked after
    /// the searches.
    pub(crate) fn has_woken_in_vain(&mut self, now: Instant) -> bool {
        let is_due = |window: &Window| window.jobs.front().is_some_and(|job| job.scheduled_at <= now);
        let is_empty = |lane: &Lane| self.windows.get(lane).is_none_or(|window| !window.is_stale && !is_due(window));
        let in_vain = self.woken.iter().any(is_empty);
        self.woken.clear();
        self.woken_in_vain = if in_vain { self.woken_in_vain + 1 } else { 0 };
        in_vain
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use recruiter_common::{
        ids::WorkerId,
        limits::{GroupSettings, Limit, Rate, Settings},
        store::{KeptCells, ScheduledJob, gate_of_line},
    };

    use super::*;
    use crate::leader::{
        fleet::tests::{available, fleet},
        lanes::windows::{
            Search,
            tests::{NOW, date, found, job, lane},
            window::Found,
        },
    };

    /// Lanes of one group and class with these gates, of which two may be awake.
    fn crowded(gates: &[&str]) -> (Windows, Vec<Lane>) {
        let all: Vec<Lane> = gates.iter().map(|gate| Lane { gate: Some(gate_of_line(gate)), ..lane("a") }).collect();
        let mut lanes = Windows { crowd: 2, ..Windows::default() };
        lanes.begin_scan(all.iter().cloned(), [0], date(NOW + 2_000), |_| false);
        (lanes, all)
    }

    /// Returns the gates of the lanes that have windows then.
    fn wake(lanes: &mut Windows) -> Vec<String> {
        let fleet = fleet(vec![available(&["*"], &["a"], 1)]);
        let are_left = lanes.wake(&HashMap::from([(0, 1)]), fleet.kinds(), &Admission::default(), date(NOW), Monotonic::now());
        assert!(!are_left);
        let mut awake: Vec<String> = lanes.windows.keys().map(|lane| lane.gate.clone().unwrap_or_default()).collect();
        awake.sort();
        awake
    }

    /// A search has found this job in its lane.
    fn searched(lanes: &mut Windows, lane: &Lane, scheduled_at: i64) {
        let job = ScheduledJob { gate: lane.gate.clone(), ..job("a", 5, scheduled_at) };
        let jobs = Found { jobs: [job.clone()].into(), pause_ends_at: None };
        let mut search = Search { found: [(lane.clone(), jobs)].into(), end: Some(job.position()), ..found(&[], None) };
        lanes.fill(std::slice::from_ref(lane), &mut search, Monotonic::now());
    }

    #[test]
    fn very_many_lanes_with_a_gate_take_turns() {
        let (mut lanes, all) = crowded(&["v", "w", "x", "y", "z"]);
        assert!(lanes.windows.is_empty());
        assert_eq!(wake(&mut lanes), [">v", ">w"]);
        assert!(lanes.windows.values().all(|window| window.is_stale && window.able == [0]));
        assert_eq!(wake(&mut lanes), [">v", ">w"], "two are ready");
        searched(&mut lanes, &all[0], NOW - 1);
        searched(&mut lanes, &all[1], NOW - 2);
        assert_eq!(wake(&mut lanes), [">v", ">w"]);
        // In a scan the most urgent known one stays awake, and another one has its turn.
        lanes.begin_scan(all.iter().cloned(), [0], date(NOW + 2_000), |_| false);
        assert_eq!(wake(&mut lanes), [">w", ">x"]);
        // What is due later fills no place.
        searched(&mut lanes, &all[1], NOW + 1_000);
        assert_eq!(wake(&mut lanes), [">w", ">x", ">y"]);
        lanes.mark_stale(lane("b"));
        assert_eq!(wake(&mut lanes), ["", ">w", ">x", ">y"], "a lane without a gate neither sleeps nor counts");
        lanes.begin_scan(all[..2].iter().cloned(), [0], date(NOW + 2_000), |_| false);
        assert_eq!(lanes.windows.len(), 2, "there are few, each of which counts once");
    }

    #[test]
    fn lanes_of_other_workers_and_groups_with_weights_do_not_keep_others_asleep() {
        let of = |group: &str, class: &str, gate: &str| Lane { gate: Some(gate_of_line(gate)), ..Lane::new(group, class) };
        let all = ["1", "2", "3"].map(|gate| [of("g", "a", gate), of("h", "a", gate), of("g", "b", gate)]).concat();
        let fleet = fleet(vec![available(&["*"], &["a"], 1), available(&["*"], &["b"], 1)]);
        let awake = |weights: &[(&str, f64)]| {
            let groups = weights
                .iter()
                .map(|(group, weight)| ((*group).to_owned(), GroupSettings { weight: Some(*weight), ..GroupSettings::default() }));
            let settings = Settings { groups: groups.collect(), ..Settings::default() };
            let admission = Admission::begin(settings, &[], KeptCells::default(), date(NOW));
            let mut lanes = Windows { crowd: 1, ..Windows::default() };
            lanes.begin_scan(all.iter().cloned(), [0, 1], date(NOW + 2_000), |_| false);
            lanes.wake(&HashMap::from([(0, 1), (1, 1)]), fleet.kinds(), &admission, date(NOW), Monotonic::now());
            let mut awake: Vec<(String, String)> = lanes.windows.keys().map(|lane| (lane.group.clone(), lane.class.clone())).collect();
            awake.sort();
            awake
        };
        let pair = |group: &str, class: &str| (group.to_owned(), class.to_owned());
        assert_eq!(awake(&[]), [pair("g", "a"), pair("g", "b")]);
        assert_eq!(awake(&[("g", 2.0)]), [pair("g", "a"), pair("g", "b"), pair("h", "a")]);
    }

    #[test]
    fn an_event_in_a_sleeping_lane_wakes_it_and_does_not_make_it_known() {
        let (lanes, all) = crowded(&["v", "w", "x"]);
        let announced = ScheduledJob { gate: all[0].gate.clone(), ..job("a", 5, NOW) };
        let limited = ScheduledJob { gate: Some("printer".into()), ..announced.clone() };
        let mut announcing = lanes.clone();
        announcing.asleep.insert(limited.lane());
        assert!(announcing.announce([announced.clone(), limited.clone()]), "a line must be searched");
        for lane in [&all[0], &limited.lane()] {
            assert!(announcing.windows[lane].is_stale && !announcing.sleep(lane), "others may come first");
        }
        let mut marked = lanes.clone();
        marked.mark_stale(all[0].clone());
        assert!(marked.windows[&all[0]].is_stale && !marked.sleep(&all[0]));
        // From four times as many windows on, these lanes sleep as well.
        let mut full = lanes;
        (0..8).for_each(|class| full.mark_stale(lane(&class.to_string())));
        assert!(full.announce([announced, limited.clone()]));
        full.mark_stale(all[0].clone());
        assert!(full.windows.len() == 8 && full.sleep(&all[0]) && full.sleep(&limited.lane()));
        // A list wakes fewer.
        full.windows.retain(|lane, _| ["0", "1"].contains(&lane.class.as_str()));
        full.list(all[0].clone());
        assert!(full.sleep(&all[0]));
        full.windows.clear();
        full.list(all[0].clone());
        assert!(!full.sleep(&all[0]) && full.windows[&all[0]].is_stale);
    }

    #[test]
    fn a_job_of_a_sleeping_lane_was_not_missed() {
        let (mut lanes, all) = crowded(&["x", "y", "z"]);
        let sleeping = all[0].clone();
        let fleet = fleet(vec![available(&["*"], &["a"], 1)]);
        let found = |gate: Option<String>| ScheduledJob { gate, ..job("a", 5, NOW) };
        lanes.request_audit();
        lanes.begin_scan(all, [0], date(NOW + 2_000), |_| false);
        assert!(!lanes.had_missed(&found(sleeping.gate), fleet.kinds()) && lanes.had_missed(&found(Some(">new".into())), fleet.kinds()));
    }

    #[test]
    fn full_lanes_keep_no_other_asleep_and_cause_no_round_in_vain() {
        let settings = Settings { limits: [("p:*".into(), Limit::capacity(1))].into(), ..Settings::default() };
        let mut admission = Admission::begin(settings, &[], KeptCells::default(), date(NOW));
        let all: Vec<Lane> = (1..=6).map(|number| Lane { gate: Some(format!("p:{number}")), ..lane("a") }).collect();
        let fleet = fleet(vec![available(&["*"], &["a"], 1)]);
        let mut lanes = Windows { crowd: 1, ..Windows::default() };
        lanes.begin_scan(all.clone(), [0], date(NOW + 2_000), |_| false);
        let mut again = lanes.clone();
        let wake = |lanes: &mut Windows, admission: &Admission, slots: usize| {
            lanes.wake(&HashMap::from([(0, slots)]), fleet.kinds(), admission, date(NOW), Monotonic::now());
            let mut awake: Vec<String> = lanes.windows.keys().filter_map(|lane| lane.gate.clone()).collect();
            awake.sort();
            awake
        };
        assert_eq!(wake(&mut lanes, &admission, 4), ["p:1", "p:2", "p:3", "p:4"]);
        for full in &all[..4] {
            searched(&mut lanes, full, NOW - 1);
            admission.admit(WorkerId::new(), full, &job("a", 5, NOW), date(NOW)).unwrap();
        }
        assert_eq!(wake(&mut lanes, &admission, 1), ["p:1", "p:2", "p:3", "p:4", "p:5"], "jobs of the others fill no slot");
        assert_eq!(wake(&mut again, &admission, 1), ["p:1", "p:5"]);
        again.fill(&all[..1], &mut found(&[], None), Monotonic::now());
        searched(&mut again, &all[4], NOW - 1);
        assert!(!again.has_woken_in_vain(date(NOW)), "the slot is filled");
    }

    #[test]
    fn sleeping_lanes_that_may_not_start_a_job_are_passed_over_and_their_dates_are_known() {
        let limit = |rate| Limit::new(None, rate);
        let rate = Rate::new(1, Duration::from_secs(60), 1).unwrap();
        let settings = Settings { limits: [("slow".into(), limit(Some(rate)))].into(), ..Settings::default() };
        let mut admission = Admission::begin(settings, &[], KeptCells::default(), date(NOW));
        let slow = Lane { gate: Some("slow".into()), ..lane("a") };
        let taken = ScheduledJob { gate: slow.gate.clone(), ..job("a", 5, NOW) };
        admission.admit(WorkerId::new(), &slow, &taken, date(NOW)).unwrap();
        let fleet = fleet(vec![available(&["*"], &["a"], 1)]);
        let mut lanes = Windows { crowd: 0, ..Windows::default() };
        let undefined = Lane { gate: Some("undefined".into()), ..lane("a") };
        let line = Lane { gate: Some(gate_of_line("x")), ..lane("a") };
        let other = Lane { gate: Some(gate_of_line("x")), ..lane("nobody") };
        lanes.begin_scan([&slow, &undefined, &line, &other].map(Clone::clone), [0], date(NOW + 2_000), |_| false);
        let free = HashMap::from([(0, 1)]);
        let wake = |lanes: &mut Windows, now| lanes.wake(&free, fleet.kinds(), &admission, now, Monotonic::now());
        assert!(lanes.windows.is_empty() && !wake(&mut lanes, date(NOW)));
        assert_eq!(lanes.windows.keys().collect::<Vec<_>>(), [&line], "it alone may start, and a worker takes it");
        lanes.windows.clear();
        assert!(!wake(&mut lanes, date(NOW)) && lanes.windows.is_empty());
        let opens_at = admission.opens_at(&slow, date(NOW)).unwrap();
        assert_eq!(lanes.next_round(&free, &admission, date(NOW)).0, Some(opens_at));
        wake(&mut lanes, opens_at);
        assert_eq!(lanes.windows.keys().collect::<Vec<_>>(), [&slow]);
    }
}
