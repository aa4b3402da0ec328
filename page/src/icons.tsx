/** Icons of one stroke, drawn for 24 pixels. */
const PATHS = {
  plus: "M12 5v14M5 12h14",
  menu: "M4 7h16M4 12h16M4 17h16",
  sliders: "M4 7h9m5 0h2M4 17h2m5 0h9M13 4.5v5M6 14.5v5",
  sun: "M12 3v2m0 14v2M3 12h2m14 0h2M5.6 5.6 7 7m10 10 1.4 1.4M5.6 18.4 7 17M17 7l1.4-1.4M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8Z",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5Z",
  send: "M12 19V5m-6 6 6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v11H9zM5 15V4h10",
  check: "m5 12.5 4.5 4.5L19 7.5",
  edit: "M4 20h4L19 9l-4-4L4 16z",
  again: "M19.5 12a7.5 7.5 0 1 1-2.2-5.3M19.5 4v4h-4",
  trash: "M5 7h14M10 7V4.5h4V7m-7.5 0 1 13h9l1-13",
  left: "m14.5 6-6 6 6 6",
  right: "m9.5 6 6 6-6 6",
  close: "m6 6 12 12M18 6 6 18",
  code: "m8.5 8-4 4 4 4m7-8 4 4-4 4",
  tokens: "M4 7h6v4H4zm8 0h8v4h-8zM4 13h9v4H4zm11 0h5v4h-5z",
  columns: "M4 5h16v14H4zM12 5v14",
  down: "M12 4v11m-5-5 5 5 5-5M5 20h14",
  up: "M12 20V9m-5 5 5-5 5 5M5 4h14",
  help: "M9.2 9.2a2.9 2.9 0 1 1 4 2.7c-.8.4-1.2 1-1.2 1.9v.5m0 3.2v.1",
  key: "M14.5 14.5a5 5 0 1 0-4-4L4 17v3h3v-2h2v-2h2z",
  tool: "M14.5 6.5a4 4 0 0 1 5-1l-2.7 2.7.3 1.7 1.7.3L21 7.6a4 4 0 0 1-5.3 4.6L9 19a2.1 2.1 0 0 1-3-3l6.7-6.7a4 4 0 0 1 1.8-2.8Z",
  image: "M4 5h16v14H4zm0 11 5-5 4 4 2.5-2.5L20 17M15.5 9.5h.1",
  chat: "M5 5h14v11h-8l-4 3.5V16H5z",
  pulse: "M3 12h4l2.5-7 5 14 2.5-7h4",
  book: "M5 4.5h10a4 4 0 0 1 4 4V20H9a4 4 0 0 1-4-4z M9 9h6m-6 4h6",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name }: { name: IconName }) {
  return (
    <svg class="icon" viewBox="0 0 24 24" aria-hidden="true" focusable="false">
      <path d={PATHS[name]} />
    </svg>
  );
}

export function Logo() {
  return (
    <svg class="logo" viewBox="0 0 24 24" aria-hidden="true" focusable="false">
      <path class="warp" d="M8 3.5v3M8 10v10.5M16 3.5V14m0 4v2.5" />
      <path class="weft" d="M3.5 8h11m4 0h2M3.5 16h2.200m4.600 0h10.200" />
    </svg>
  );
}
