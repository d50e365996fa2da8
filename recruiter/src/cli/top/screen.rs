//! How the view is drawn: a line about the whole, two graphs, three tables, and a line for questions and answers. Text from the database is
//! untrusted: control characters are escaped.

use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style, Stylize as _},
    text::{Line, Span},
    widgets::{Block, Borders, Paragraph, RenderDirection, Row, Sparkline, Table, TableState},
};
use recruiter_common::{instant::Instant, workers::Leader};

use super::{
    board::{Board, Pane, place},
    history::{Point, RECENT, mean},
    reading::{Failed, Reading},
};
use crate::cli::{
    output::{briefly_apart, printable},
    presence::Worker,
    view::colour,
};
use crate::views::{counts::GroupCounts, workers};

/// The smallest terminal in which everything has room.
const SMALLEST: (u16, u16) = (40, 16);
const KEYS: &str = "Tab, arrows · p: pause · u: quiet · s: stop · r: retry · Space: hold · q: leave";

pub(super) fn draw(frame: &mut Frame<'_>, board: &Board) {
    let area = frame.area();
    if area.width < SMALLEST.0 || area.height < SMALLEST.1 {
        let (columns, lines) = SMALLEST;
        return frame.render_widget(Paragraph::new(format!("needs {columns} columns and {lines} lines; q: leave")), area);
    }
    let [line, graph, table] = [Constraint::Length(1), Constraint::Length(4), Constraint::Fill(1)];
    let [head, graphs, groups, workers, failures, foot] = Layout::vertical([line, graph, table, table, table, line]).areas(area);
    frame.render_widget(header(board), head);
    if let Some(reading) = &board.reading {
        draw_graphs(frame, graphs, reading);
        draw_groups(frame, groups, board, reading.at);
        draw_workers(frame, workers, board, reading.at);
        draw_failures(frame, failures, board, reading.at);
    }
    frame.render_widget(footer(board), foot);
}

/// The database, the leader, the slots of all workers, and when it was read.
fn header(board: &Board) -> Line<'static> {
    let database = printable(&board.database, 30).bold();
    let Some(reading) = &board.reading else { return Line::from_iter([database, "  reading …".into()]) };
    let leader =
        if let Leader::Leads(who) = &reading.leader { format!("led by {who}").into() } else { "NO LEADER: no job starts".red().bold() };
    let number = |field| reading.workers.iter().filter_map(|worker| integer(worker, field)).sum::<u64>();
    let (free, all) = (number("free"), number("capacity"));
    let slots = format!("{} workers, {}/{all} slots busy", reading.workers.len(), all.saturating_sub(free));
    let held = if board.is_held { " HELD".yellow().bold() } else { Span::default() };
    let at = reading.at.format("%H:%M:%S UTC").to_string();
    Line::from_iter([at.into(), held, "  ".into(), database, "  ".into(), leader, "  ".into(), slots.into()])
}

fn integer(worker: &Worker, field: &str) -> Option<u64> {
    let value = worker.document.get(field)?;
    value.as_i32().map(i64::from).or(value.as_i64()).and_then(|number| u64::try_from(number).ok())
}

/// What is most urgent to say.
fn footer(board: &Board) -> Line<'static> {
    if let Some(asked) = &board.asked {
        return Line::from_iter([asked.question.clone().black().on_yellow(), " y: yes, any other key: no".into()]);
    }
    match (&board.said, &board.problem) {
        (Some(said), _) => Line::from(printable(said, 400)).cyan(),
        (None, Some(problem)) => Line::from(format!("cannot read: {}", printable(problem, 400))).red(),
        (None, None) if board.is_acting => Line::from("…"),
        (None, None) => Line::from(KEYS).dim(),
    }
}

fn draw_graphs(frame: &mut Frame<'_>, area: Rect, reading: &Reading) {
    let [left, right] = Layout::horizontal([Constraint::Fill(1); 2]).spacing(1).areas(area);
    let recent = &reading.points[..reading.points.len().min(RECENT)];
    let of = |number: fn(&Point) -> u64| mean(recent.iter().map(number).sum(), recent.len());
    let (done, failed) = (of(|point| point.done), of(|point| point.failed));
    let failed = if failed > 0.0 { format!(" {failed:.1} failed/s ").red() } else { Span::default() };
    let title = Line::from_iter([format!(" {done:.1} done/s ").bold(), failed]);
    draw_graph(frame, left, title, Color::Green, &reading.points, |point| Some(point.done));
    let latency = reading.latency.map_or_else(|| " latency - ".into(), |(p50, p99)| format!(" latency {p50} ms, 99 %: {p99} ms "));
    draw_graph(frame, right, Line::from(latency.bold()), Color::Cyan, &reading.points, |point| point.p99);
}

/// One bar for each second, the newest on the right.
fn draw_graph(frame: &mut Frame<'_>, area: Rect, title: Line<'static>, colour: Color, points: &[Point], of: fn(&Point) -> Option<u64>) {
    let block = Block::new().borders(Borders::TOP).border_style(Style::new().dim()).title(title);
    let bars: Vec<Option<u64>> = points.iter().map(of).collect();
    frame.render_widget(Sparkline::default().block(block).data(bars).direction(RenderDirection::RightToLeft).style(colour), area);
}

fn draw_groups(frame: &mut Frame<'_>, area: Rect, board: &Board, at: Instant) {
    let row = |group: &GroupCounts| {
        let GroupCounts { name, due, later, has_more, oldest, running, done_per_second, is_paused } = group;
        let more = if *has_more { "+" } else { "" };
        let oldest = oldest.map_or_else(|| "-".into(), |oldest| briefly_apart(oldest, at));
        let numbers = [format!("{due}{more}"), oldest, format!("{later}{more}"), running.to_string(), format!("{done_per_second:.1}")];
        let state = if *is_paused { Span::from("paused").yellow() } else { Span::default() };
        let cells = std::iter::once(Line::from(printable(name, 80)));
        Row::new(cells.chain(numbers.map(|number| Line::from(number).right_aligned())).chain([Line::from(state)]))
    };
    let widths = [Constraint::Fill(1), right(8), right(6), right(8), right(8), right(8), right(6)];
    let titles = ["GROUP", "DUE", "SINCE", "LATER", "RUNNING", "DONE/S", ""];
    draw_table(frame, area, board, Pane::Groups, titles, widths, board.groups().iter().map(row));
}

fn draw_workers(frame: &mut Frame<'_>, area: Rect, board: &Board, at: Instant) {
    let row = |worker: &Worker| {
        let (state, tone) = workers::state(worker);
        let colour = colour(tone).map_or(Color::Reset, |ansi| Color::Indexed(ansi as u8));
        let slots = |field| integer(worker, field).map_or_else(|| "-".into(), |number| number.to_string());
        let seen = worker.document.get_datetime("last_seen_at").map(|seen| briefly_apart(seen.to_chrono(), at));
        let numbers = [format!("{}/{}", slots("free"), slots("capacity")), seen.unwrap_or_else(|_| "never".into())];
        let groups = printable(&workers::works_on(worker), 200);
        let cells = [Line::from(place(worker)), Line::from(Span::from(state).fg(colour))];
        Row::new(cells.into_iter().chain(numbers.map(|number| Line::from(number).right_aligned())).chain([Line::from(groups)]))
    };
    let widths = [Constraint::Fill(2), right(9), right(9), right(6), Constraint::Fill(1)];
    draw_table(frame, area, board, Pane::Workers, ["WORKER", "STATE", "FREE", "SEEN", "GROUPS"], widths, board.workers().iter().map(row));
}

fn draw_failures(frame: &mut Frame<'_>, area: Rect, board: &Board, at: Instant) {
    let row = |failed: &Failed| {
        let texts = [printable(&failed.class, 40), printable(&failed.group, 40), printable(&failed.error, 400)];
        let ago = Line::from(briefly_apart(failed.ended_at, at)).right_aligned();
        Row::new(std::iter::once(ago).chain(texts.map(Line::from)))
    };
    let widths = [right(6), Constraint::Max(16), Constraint::Max(12), Constraint::Fill(1)];
    draw_table(frame, area, board, Pane::Failures, ["AGO", "FAILED", "GROUP", "ERROR"], widths, board.failures().iter().map(row));
}

fn right(width: u16) -> Constraint {
    Constraint::Length(width)
}

/// A table, whose selected row is marked if it is the table of the keys. Columns of numbers have a fixed width, and their titles are on the
/// right, as the numbers are.
fn draw_table<'a, const N: usize>(
    frame: &mut Frame<'_>,
    area: Rect,
    board: &Board,
    pane: Pane,
    titles: [&'static str; N],
    widths: [Constraint; N],
    rows: impl Iterator<Item = Row<'a>>,
) {
    let is_chosen = pane == board.pane;
    let style = if is_chosen { Style::new().bold() } else { Style::new().dim() };
    let title = |(title, width): (&'static str, &Constraint)| {
        let is_number = matches!(width, Constraint::Length(_)) && title != "STATE";
        if is_number { Line::from(title).right_aligned() } else { Line::from(title) }
    };
    let head = Row::new(titles.into_iter().zip(&widths).map(title)).style(style.add_modifier(Modifier::UNDERLINED));
    let marked = if is_chosen { Style::new().reversed() } else { Style::new() };
    let table = Table::new(rows, widths).header(head).row_highlight_style(marked);
    frame.render_stateful_widget(table, area, &mut TableState::new().with_selected(board.row(pane)));
}

#[cfg(test)]
mod tests {
    use bson::doc;
    use ratatui::{Terminal, backend::TestBackend, crossterm::event::KeyCode};

    use super::{
        super::board::tests::{failed, group, reading, worker},
        *,
    };

    /// The lines of the view in a terminal of this size.
    fn shown(board: &Board, columns: u16, lines: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(columns, lines)).unwrap();
        terminal.draw(|frame| draw(frame, board)).unwrap();
        let buffer = terminal.backend().buffer();
        let text = |line: u16| (0..columns).map(|column| buffer[(column, line)].symbol()).collect::<String>();
        (0..lines).map(|line| text(line).trim_end().to_owned()).collect()
    }

    fn words(line: &str) -> Vec<&str> {
        line.split_whitespace().collect()
    }

    #[test]
    fn everything_has_its_place_in_a_terminal_of_80_columns_and_24_lines() {
        let mut board = Board::new("shop");
        let later =
            GroupCounts { due: 20_000, later: 7, has_more: true, oldest: Some(Instant::UNIX_EPOCH), is_paused: true, ..group("mail") };
        let busy = GroupCounts { running: 3, done_per_second: 12.25, ..group("reports") };
        let two = vec![worker(7, doc! {}), worker(8, doc! { "free": 0, "available": false, "work_on": ["mail", "reports"] })];
        board.take(Ok(reading(vec![later, busy], two, vec![failed("timeout: 30 s")])));
        let lines = shown(&board, 80, 24);
        assert_eq!(lines[0], "00:00:00 UTC  shop  led by web:1  2 workers, 5/8 slots busy");
        assert!(lines[1].contains(" 4.5 done/s ") && lines[1].contains(" latency 3 ms, 99 %: 12 ms "), "{}", lines[1]);
        let line = |begin: &str| lines.iter().find(|line| line.starts_with(begin)).map(|line| words(line)).unwrap_or_default();
        assert_eq!(line("GROUP"), ["GROUP", "DUE", "SINCE", "LATER", "RUNNING", "DONE/S"]);
        assert_eq!(line("mail"), ["mail", "20000+", "0s", "7+", "0", "0.0", "paused"]);
        assert_eq!(line("reports"), ["reports", "0", "-", "0", "3", "12.2"]);
        assert_eq!(line("web:7"), ["web:7", "available", "3/4", "0s", "all", "groups"]);
        assert_eq!(line("web:8"), ["web:8", "busy", "0/4", "0s", "mail,", "reports"]);
        assert!(lines.iter().any(|line| words(line) == ["0s", "mail", "g", "timeout:", "30", "s"]), "{lines:#?}");
        assert_eq!(lines[23], KEYS);
        board.key(KeyCode::Char('p').into());
        assert_eq!(shown(&board, 80, 24)[23], "Resume the group mail? y: yes, any other key: no");
    }

    #[test]
    fn the_selected_row_is_seen_however_long_the_table_is() {
        let mut board = Board::new("shop");
        board.take(Ok(reading((0..90).map(|n| group(&format!("group-{n:02}"))).collect(), vec![], vec![])));
        assert!(shown(&board, 80, 24).iter().any(|line| line.starts_with("group-00")));
        board.key(KeyCode::End.into());
        assert!(shown(&board, 80, 24).iter().any(|line| line.starts_with("group-89")));
    }

    #[test]
    fn hostile_names_and_odd_documents_change_nothing_outside_of_their_cells() {
        let mut board = Board::new("shop");
        let hostile = "\u{1b}[2J\r\n\u{202e}é\u{300}漢字\t".repeat(40);
        let odd = doc! { "work_on": 7, "free": -3, "capacity": i64::MAX, "hostname": &hostile, "pid": { "a": 1 }, "last_seen_at": "no" };
        board.take(Ok(reading(vec![group(&hostile)], vec![worker(1, odd)], vec![failed(&hostile)])));
        for (columns, lines) in [(80, 24), (40, 16), (300, 100), (39, 15), (1, 1), (0, 0)] {
            let shown = shown(&board, columns, lines);
            assert!(shown.iter().all(|line| !line.contains(|c: char| c.is_control() || c == '\u{202e}')), "{shown:#?}");
        }
        assert!(shown(&board, 60, 10)[0].starts_with("needs 40 columns and 16 lines"));
    }

    #[test]
    fn what_is_missing_or_wrong_is_said() {
        let mut board = Board::new("shop");
        assert_eq!(shown(&board, 80, 24)[0], "shop  reading …");
        let no_leader = Reading { leader: Leader::Absent("none".into()), latency: None, ..reading(vec![], vec![], vec![]) };
        board.take(Ok(no_leader));
        board.take(Err("MongoDB is away".into()));
        board.key(KeyCode::Char(' ').into());
        let lines = shown(&board, 80, 24);
        assert!(lines[0].contains("HELD") && lines[0].contains("NO LEADER: no job starts"), "{}", lines[0]);
        assert!(lines[1].contains(" latency - "), "{}", lines[1]);
        assert_eq!(lines[23], "cannot read: MongoDB is away");
        board.say("done".into());
        assert_eq!(shown(&board, 80, 24)[23], "done");
    }
}
